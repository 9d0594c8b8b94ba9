"""Plan of a config: preflight checks, processes, memory, overlap."""
