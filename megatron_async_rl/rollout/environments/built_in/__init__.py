"""Built-in environments. The file NAME.py is the environment NAME: its `ENVIRONMENT` makes one."""
