"""Processes and sandboxes that isolate user code from the engine."""
