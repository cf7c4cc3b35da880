"""Evaluation datasets, under the import path of slime plugins."""

from slime.config.datasets import EvalDataset as EvalDatasetConfig

__all__ = ["EvalDatasetConfig"]
