"""`load_function` and `SingletonMeta` under the path that slime plugins import them from."""

from __future__ import annotations

from typing import Any

from slime.rollout.functions import load_function

__all__ = ["SingletonMeta", "load_function"]


class SingletonMeta(type):
    """Metaclass of classes with one instance; the arguments of later calls are ignored."""

    _instance: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_instance" not in cls.__dict__:
            cls._instance = super().__call__(*args, **kwargs)
        return cls._instance

    def clear_instances(cls) -> None:
        """Forget the instance; the next call makes a new one."""
        if "_instance" in cls.__dict__:
            del cls._instance
