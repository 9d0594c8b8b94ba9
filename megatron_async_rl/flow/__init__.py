"""Which samples train when: the staleness law and the controller that admits, orders and hands out
groups. No torch."""
