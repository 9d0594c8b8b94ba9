"""Isolation of user code: all code that runs in processes and sandboxes of its own."""
