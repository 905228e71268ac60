"""The commands of ``srl``: each takes its arguments and returns an exit code."""
