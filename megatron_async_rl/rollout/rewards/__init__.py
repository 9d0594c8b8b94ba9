"""Rewards. `registry.py` finds one by its name and says what a reward is."""
