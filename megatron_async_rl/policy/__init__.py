"""The model: layout, weights, log-probs, micro-batch schedule, optimizer step, checkpoints, and the
device layer, which also works without CUDA."""
