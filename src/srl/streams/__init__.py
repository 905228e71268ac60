"""Streams: what joins workers, over several transports."""
