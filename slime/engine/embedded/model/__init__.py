"""Computes a scheduled batch: attention, kernels, layers, and sampling of the next tokens."""
