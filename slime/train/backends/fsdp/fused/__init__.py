"""Decoder layers of the plain kind from a few kernels and large matrix products."""
