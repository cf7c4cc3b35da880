"""The data sources under the path that slime plugins import them from."""

from slime.data.source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer, pop_first

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]
