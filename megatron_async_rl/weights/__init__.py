"""Transport of policy weights to the engines and to disk: export under Hugging Face names,
carriers, digests, conversion."""
