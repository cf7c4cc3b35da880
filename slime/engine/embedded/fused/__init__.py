"""Decoder blocks from our own kernels: the families whose step is a few large kernels instead of many small ones."""
