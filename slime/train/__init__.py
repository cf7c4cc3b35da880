"""Training: samples to tensors, packing and balancing, the optimizer step, checkpoints."""
