"""`Sample` under the path that slime plugins import it from."""

from typing import Any

from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo

RolloutBatch = dict[str, Any]

__all__ = ["PrefixCacheInfo", "RolloutBatch", "Sample", "SpecInfo"]
