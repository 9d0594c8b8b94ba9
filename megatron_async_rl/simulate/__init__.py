"""Predictions of a config's speed and of the age of its samples, without a run."""
