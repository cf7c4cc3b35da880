"""Weights on their way to engines and folders."""
