"""What the step is: controls that see the reduced gradient before clipping, and may change it, skip it or scale its step."""
