"""The `args` of plugins: a writable namespace over a config that never changes.

Invariant: a value that a plugin writes is visible to all plugins of the same process and never to the run itself.
Copies (`copy.copy`, `copy.deepcopy`, `argparse.Namespace(**vars(args))`, pickles) are plain namespaces with all values,
and carry the mark that identifies the running rollout.
"""

from __future__ import annotations

import argparse
import logging
import uuid
from collections.abc import Callable
from typing import Any

from slime.storage.json_types import JsonMapping, JsonObject

RUN_MARK = "slime_run_mark"
"""Attribute that identifies the run of a namespace."""

PLAIN = (str, int, float, bool, type(None), list, tuple, dict)

logger = logging.getLogger(__name__)


class Overlay:
    """The values that plugins of this process see and have written, shared by all copies of one config."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.base: JsonObject = {RUN_MARK: self.mark}
        """The values of the run, without changes by plugins."""
        self.args = PluginArgs(self)
        self._written: set[str] = set()
        self._told: set[str] = set()
        self._shown: list[object] = []
        self.resolved: object | None = None
        """The config that was resolved together with this overlay, until a run uses it."""

    def show(self, config: object, facts: Callable[[], JsonMapping]) -> PluginArgs:
        """Return the namespace, to which the values of a config are added the first time that it is passed."""
        if not any(one is config for one in self._shown):
            self._shown.append(config)
            self._learn({name: value for name, value in facts().items() if name not in self._told})
        return self.args

    def tell(self, facts: JsonMapping) -> None:
        """Set values that become known after the flags (a rank, an address); configs no longer change them."""
        self._told.update(facts)
        self._learn(facts)

    def _learn(self, facts: JsonMapping) -> None:
        """Add or change values of the run; a name that a plugin has written keeps the plugin's value."""
        new = {name: value for name, value in facts.items() if not is_same(value, self.base.get(name, self))}
        self.base.update(new)
        vars(self.args).update({name: copy_containers(new[name]) for name in new if name not in self._written})

    def note_written(self, name: str, value: object) -> None:
        """Log, once per name of the run, that a plugin's value does not change the run."""
        if name not in self.base or is_same(value, self.base[name]) or name in self._written:
            return
        self._written.add(name)
        logger.warning(
            "a plugin set args.%s = %.80r: plugins see it, but the run keeps %.80r; to change the run, give --%s "
            "before it starts",
            name,
            value,
            self.base[name],
            name.replace("_", "-"),
        )


class PluginArgs(argparse.Namespace):
    """The namespace of an overlay; its `__dict__` holds the values and nothing else."""

    __slots__ = ("_overlay",)

    def __init__(self, overlay: Overlay) -> None:
        object.__setattr__(self, "_overlay", overlay)
        vars(self).update(overlay.base)

    def __setattr__(self, name: str, value: object) -> None:
        self._overlay.note_written(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name}: it is neither a flag nor an entry of --custom-config-path, and no plugin has set it"
        )

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return argparse.Namespace, (), dict(vars(self))


def run_mark(args: object) -> str | None:
    """Return the mark of the run whose namespace this is, or is a copy of."""
    return getattr(args, "__dict__", {}).get(RUN_MARK)


def copy_containers(value: object) -> object:
    """Copy the lists and dicts in a value, so that writing into them does not change the original."""
    if isinstance(value, list):
        return [copy_containers(item) for item in value]
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    return value


def is_same(value: object, known: object) -> bool:
    """Return whether a value equals the known one; objects that are not plain are compared by identity."""
    return value is known or (isinstance(value, PLAIN) and isinstance(known, PLAIN) and bool(value == known))
