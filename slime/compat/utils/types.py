"""`Sample` and batch types, under the import path of slime plugins."""

from typing import Any

from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo

RolloutBatch = dict[str, Any]

__all__ = ["PrefixCacheInfo", "RolloutBatch", "Sample", "SpecInfo"]
