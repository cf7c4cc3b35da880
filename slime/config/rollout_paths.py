"""Paths of which a run makes one per rollout: `{rollout_id}` in them is filled in."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter


@dataclass(frozen=True)
class RolloutPath:
    """A path, with or without the placeholder; links in the part before it are followed.

    `named` are other words than a number that may stand in the placeholder's place, in front of one.
    """

    template: str
    named: str = ""

    @property
    def is_one(self) -> bool:
        """Whether it is the same for every rollout."""
        return all(field is None for _, field, _, _ in Formatter().parse(self.template))

    @property
    def real(self) -> str:
        """The template as an absolute one, without links up to the part that has the placeholder."""
        fixed, rest = self._split()
        return os.path.join(os.path.realpath(fixed), rest) if rest else os.path.realpath(fixed)

    @property
    def fixed_folder(self) -> Path:
        """The folder that all of these paths are in."""
        fixed, rest = self._split()
        real = Path(os.path.realpath(fixed))
        return real if rest else real.parent

    def rollout_of(self, path: Path) -> int | None:
        """The rollout whose path this would be; 0 for a path that is every rollout's."""
        fixed, rest = self._split()
        folder = os.path.realpath(fixed)
        if not rest:
            return 0 if str(path) == folder else None
        inner = os.path.relpath(path, folder)
        for number in re.findall(r"\d+", inner):
            for word in (int(number), f"{self.named}{int(number)}"):
                if self._filled(rest, word) == inner:
                    return int(number)
        return None

    def present(self) -> Iterator[tuple[int, Path]]:
        """Those that exist, with their rollouts."""
        fixed, rest = self._split()
        names = "".join(glob.escape(text) + "*" * (field is not None) for text, field, _, _ in Formatter().parse(rest))
        pattern = os.path.join(glob.escape(os.path.realpath(fixed)), names) if rest else glob.escape(self.real)
        for name in glob.glob(pattern):
            rollout_id = self.rollout_of(Path(name))
            if rollout_id is not None:
                yield rollout_id, Path(name)

    def folders_on_the_way(self) -> Iterator[Path]:
        """The existing folders that the paths lead through from where they part, and they themselves."""
        for template in (self.template, *map(str, Path(self.template).parents)):
            path = RolloutPath(template)
            if not path.is_one or template == self.template:
                yield from (Path(os.path.realpath(found)) for _, found in path.present())

    def _split(self) -> tuple[str, str]:
        """The folders before the first part with the placeholder, and the rest (nothing, where there is none)."""
        parts = Path(os.path.abspath(self.template)).parts
        first = next((i for i, part in enumerate(parts) if not RolloutPath(part).is_one), len(parts))
        before = "".join(text for text, _, _, _ in Formatter().parse(os.path.join(*parts[:first])))
        return before, os.path.join(*parts[first:]) if first < len(parts) else ""

    def _filled(self, template: str, word: int | str) -> str | None:
        try:
            return template.format(rollout_id=word)
        except ValueError:  # a format that is for numbers alone
            return None
