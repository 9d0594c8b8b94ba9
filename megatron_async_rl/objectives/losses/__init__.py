"""Losses: pure functions from response tokens to token losses, one file each."""
