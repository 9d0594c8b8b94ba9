"""Controls of the step: they see the reduced gradient before clipping, and may change it,
skip it or scale its step."""
