"""`parse_args` under the path that slime plugins and own drivers import it from."""

from slime.config import parse_args

__all__ = ["parse_args"]
