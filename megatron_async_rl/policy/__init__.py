"""The model: layout, weights, log-probs, micro-batch schedule, optimizer step, checkpoints, and the
CUDA-free device layer."""
