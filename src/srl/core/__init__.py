"""The base of everything: specs, slabs, memory, the worker protocol, errors. No algorithm, no transport."""
