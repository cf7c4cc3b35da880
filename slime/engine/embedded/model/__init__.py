"""From a batch of scheduled tokens to sampled ones: attention, kernels, layers, sampler."""
