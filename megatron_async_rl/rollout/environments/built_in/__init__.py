"""Built-in environments. NAME.py defines the environment NAME; `ENVIRONMENT` is its factory."""
