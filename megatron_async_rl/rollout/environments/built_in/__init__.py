"""Built-in environments. NAME.py defines the environment NAME; its `ENVIRONMENT` is the factory."""
