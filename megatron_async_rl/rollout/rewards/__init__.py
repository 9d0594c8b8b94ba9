"""Rewards. `registry.py` defines rewards and finds them by name."""
