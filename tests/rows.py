"""Rows of parametrised tests."""

from __future__ import annotations

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
