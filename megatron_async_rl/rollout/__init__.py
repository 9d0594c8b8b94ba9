"""Sampling: vLLM engines as Ray actors, environments, and the rewards that score responses."""
