"""Makes samples: vLLM engines as Ray actors, and the rewards that score what they say."""
