"""User code in processes and sandboxes: the only place that runs it."""
