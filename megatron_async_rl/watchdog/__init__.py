"""Named waits, deadlines, heartbeats, stall reports."""
