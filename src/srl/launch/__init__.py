"""Launchers: what runs a graph."""
