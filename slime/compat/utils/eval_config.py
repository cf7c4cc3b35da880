"""Evaluation datasets under the path that slime plugins import them from."""

from slime.config.datasets import EvalDataset as EvalDatasetConfig

__all__ = ["EvalDatasetConfig"]
