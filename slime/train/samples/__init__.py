"""Samples as arrays, and arrays as the tensors of one forward and backward."""
