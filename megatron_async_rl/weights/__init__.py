"""Policy weights to the engines and to disk: export under Hugging Face names, transports,
digests, conversion."""
