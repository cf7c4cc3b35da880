"""`args` as plugins get it: a namespace they may write into, over a config that never changes.

Invariant: what one plugin writes, every plugin of the same process sees from then on; nothing of it reaches the run
itself. Copies (`copy.copy`, `copy.deepcopy`, `argparse.Namespace(**vars(args))`, pickles) are plain namespaces with all
values, and carry the mark by which the running rollout is found.
"""

from __future__ import annotations

import argparse
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

RUN_MARK = "slime_run_mark"
"""The attribute that says which run a namespace belongs to."""

PLAIN = (str, int, float, bool, type(None), list, tuple, dict)

logger = logging.getLogger(__name__)


class Overlay:
    """What plugins of this process see and have written. All copies of one config share it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.base: dict[str, Any] = {RUN_MARK: self.mark}
        """What the run says, without what plugins wrote over it."""
        self.args = PluginArgs(self)
        self._written: set[str] = set()
        self._told: set[str] = set()
        self._shown: list[object] = []

    def show(self, config: object, facts: Callable[[], Mapping[str, Any]]) -> PluginArgs:
        """The namespace, once it has what this config (of several, in the order they became known) says."""
        if not any(one is config for one in self._shown):
            self._shown.append(config)
            self._learn({name: value for name, value in facts().items() if name not in self._told})
        return self.args

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Say what became known after the flags (a rank, an address): from now on no config says otherwise."""
        self._told.update(facts)
        self._learn(facts)

    def _learn(self, facts: Mapping[str, Any]) -> None:
        """Add or change what the run says; a name that a plugin has written keeps the plugin's value."""
        new = {name: value for name, value in facts.items() if not is_same(value, self.base.get(name, self))}
        self.base.update(new)
        vars(self.args).update({name: unshared(new[name]) for name in new if name not in self._written})

    def note_written(self, name: str, value: Any) -> None:
        """Say once for each name of the run that a plugin's value does not change the run."""
        if name not in self.base or is_same(value, self.base[name]) or name in self._written:
            return
        self._written.add(name)
        logger.warning(
            "a plugin set args.%s = %.80r: plugins see it, but the run goes on with %.80r; to change the run, "
            "give --%s before it starts",
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

    def __setattr__(self, name: str, value: Any) -> None:
        self._overlay.note_written(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name}: it is no flag, no entry of --custom-config-path, and no plugin has set it"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return argparse.Namespace, (), dict(vars(self))


def run_mark(args: object) -> str | None:
    """The mark of the run that a namespace was given by, or copied from."""
    return getattr(args, "__dict__", {}).get(RUN_MARK)


def unshared(value: Any) -> Any:
    """The value with lists and dicts of its own, so that whoever writes into them changes nobody else's."""
    if isinstance(value, list):
        return [unshared(item) for item in value]
    if isinstance(value, dict):
        return {key: unshared(item) for key, item in value.items()}
    return value


def is_same(value: Any, known: Any) -> bool:
    """Whether a value is the known one; of objects that compare in ways of their own only the identity counts."""
    return value is known or (isinstance(value, PLAIN) and isinstance(known, PLAIN) and bool(value == known))
