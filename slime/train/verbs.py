"""Marks the methods of a trainer rank that the driver calls by name.

Invariant: a verb is declared once, by `@verb` above its method, and called by `TrainerGroup.call(name, ...)`. All ranks
run it together; its parameters and its answer are plain values, for msgpack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])
Needs = Literal["nothing", "weights", "everything"]
"""What must be on the device while a verb runs: nothing, the weights, or also the optimizer's state."""
Verbs = dict[str, tuple[Callable[..., object], Needs]]


def verb(needs: Needs = "weights") -> Callable[[Function], Function]:
    """Mark a method as a verb."""

    def mark(method: Function) -> Function:
        method.needs = needs  # type: ignore[attr-defined]
        return method

    return mark


def verbs_of(*owners: object) -> Verbs:
    """Return the verbs of these objects by name, with their needs."""
    return {
        name: (getattr(owner, name), method.needs)
        for owner in owners
        for name, method in vars(type(owner)).items()
        if hasattr(method, "needs")
    }
