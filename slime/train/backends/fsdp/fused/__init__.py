"""Fused decoder layers of the plain kind: a few Triton kernels and large matrix products."""
