"""Conversion of samples to arrays, and of arrays to the tensors of one forward and backward pass."""
