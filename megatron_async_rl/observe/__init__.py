"""Seeing a run: its metrics, live display, report, logs and named deadlines. Imports nothing of ours, and no torch."""
