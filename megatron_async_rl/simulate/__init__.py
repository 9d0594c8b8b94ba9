"""Predictions: how fast a config would run, and how old its samples would be, without running
it."""
