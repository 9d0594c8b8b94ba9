"""Start of a run: torchrun, rendezvous of nodes, run lock, signals."""
