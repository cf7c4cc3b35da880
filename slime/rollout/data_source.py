"""The data sources under the path that slime plugins import them from."""

from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
