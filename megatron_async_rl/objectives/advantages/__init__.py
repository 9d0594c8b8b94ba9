"""Advantage estimators: rewards of one group -> advantages, in float64."""
