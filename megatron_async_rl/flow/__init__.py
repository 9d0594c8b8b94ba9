"""Flow of samples: the staleness law, and the controller that admits, orders and hands out groups.
This package imports no torch."""
