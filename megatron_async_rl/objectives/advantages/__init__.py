"""Advantage estimators: the whole batch -> advantages, in float64. Pure functions."""
