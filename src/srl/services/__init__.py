"""Services: names and checkpoints."""
