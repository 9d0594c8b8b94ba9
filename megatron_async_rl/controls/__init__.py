"""Controls of the step. A control receives the reduced gradient before clipping, and may change the
gradient, skip the step or scale it."""
