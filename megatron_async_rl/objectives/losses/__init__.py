"""Losses: response tokens -> token losses. Pure functions, one file each."""
