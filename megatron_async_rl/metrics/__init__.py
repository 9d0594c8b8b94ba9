"""The catalogue of metrics and their sinks."""
