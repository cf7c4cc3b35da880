"""Parametrize rows that only `make test-long` runs, and numbers of Hypothesis examples."""

from __future__ import annotations

import os
from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """Returns a slow row that `make test-long` runs and `make test` skips. The other rows cover the same lines."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def some(names: Any, *, of: Any) -> list[Any]:
    """Returns a row for each key of `of`. Keys that are not in `names` become long rows."""
    rest = set(names) - set(of)
    assert not rest, rest
    return [name if name in names else long(name) for name in of]


def examples(count: int) -> int:
    """Returns `count` Hypothesis examples in `make test-long`, otherwise a third of them but at least 5."""
    return count if os.environ.get("SLIME_LONG") else max(5, count // 3)
