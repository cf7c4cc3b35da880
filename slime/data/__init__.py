"""Samples, prompt datasets and data sources; independent of rollout, training and engines."""
