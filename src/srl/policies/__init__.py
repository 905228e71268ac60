"""Policies: networks, action distributions, and what runs them."""
