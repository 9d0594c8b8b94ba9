"""Watchdog of a run: named waits, deadlines, heartbeats, stall reports."""
