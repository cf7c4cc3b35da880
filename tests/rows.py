"""Rows of parametrised tests, and numbers of examples."""

from __future__ import annotations

import os
from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """A row that `make test-long` runs and `make test` does not: it takes long, and the rows beside it reach the same
    lines."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def some(names: Any, *, of: Any) -> list[Any]:
    """A row for each key of `of`; those that are not among `names` are long."""
    rest = set(names) - set(of)
    assert not rest, rest
    return [name if name in names else long(name) for name in of]


def examples(count: int) -> int:
    """So many examples of Hypothesis in `make test-long`, and a third of them otherwise."""
    return count if os.environ.get("SLIME_LONG") else max(5, count // 3)
