"""Monitoring: from workers' reports to rows, displays and files."""
