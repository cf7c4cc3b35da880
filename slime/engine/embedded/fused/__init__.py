"""Decoder blocks computed by our own kernels: a step is a few large kernels instead of many small ones."""
