"""Corrections of off-policy data: a factor on each token's loss. Pure functions, one file each."""
