"""Which values of `args` a user's function cannot do without, read from its source.

Invariant: a name is reported only if the function computes with it everywhere it reads it (`range(args.x)`, arithmetic,
an ordering), so that None is an exception in every call. A name that is also tested, passed on or given a default is
the function's own business.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def computed_with(function: Callable[..., Any]) -> list[str]:
    """Attributes of the function's `args` that must be numbers; nothing where there is no source to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    computed: dict[str, bool] = {}
    for name, context in _reads(tree, "args"):
        computed[name] = computed.get(name, True) and _needs_number(context)
    return [name for name, always in computed.items() if always]


def _reads(tree: ast.AST, holder: str) -> Iterator[tuple[str, ast.AST]]:
    """Names read from `holder`, each with the expression around it."""
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == holder:
                yield child.attr, parent


def _needs_number(context: ast.AST) -> bool:
    if isinstance(context, ast.Call):
        return isinstance(context.func, ast.Name) and context.func.id == "range"
    if isinstance(context, ast.BinOp):
        return not isinstance(context.op, ast.Mod)  # which also fills in texts
    return isinstance(context, ast.Compare) and all(isinstance(op, _ORDERINGS) for op in context.ops)
