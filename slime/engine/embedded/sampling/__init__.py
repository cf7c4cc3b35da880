"""Sampling on a GPU: settings and penalties by table row, top-k/top-p without sorting, sampling in two passes."""
