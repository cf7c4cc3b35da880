"""Samples, prompt datasets and the data source; knows nothing of rollout, training or engines."""
