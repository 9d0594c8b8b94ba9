"""Flow of samples: the staleness law, and the controller that admits, orders and hands out groups.
Imports no torch."""
