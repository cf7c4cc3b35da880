"""A user's data source, made whole.

Invariant: whatever class `--data-source-path` names, the run sees groups of `Sample`s with indices, a buffer that takes
groups back and serves them first, `save` and `load`. What the class has itself is used; only what it lacks is added.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from slime.data.sample import Sample
from slime.data.source import Group, RolloutDataSource, remove_chosen
from slime.errors import UserError
from slime.plugins import load_plugin, takes_nothing

logger = logging.getLogger(__name__)

FLAG = "--data-source-path"


def make_data_source(args: Any) -> Any:
    """The data source of a run: our own ones as they are, any other one made whole."""
    factory = load_plugin(args.data_source_path, FLAG)
    source = factory() if takes_nothing(factory) else factory(args)
    return source if isinstance(source, RolloutDataSource) else UserSource(source, args)


class UserSource:
    """The parts of a data source that a user's class may leave out, around the object itself.

    `get_samples(n)` may return groups or single samples; a single one stands for `n_samples_per_prompt` of its kind.
    """

    def __init__(self, source: Any, args: Any) -> None:
        if not _has(source, "get_samples"):
            raise UserError(f"{FLAG} {args.data_source_path} made a {type(source).__name__} without get_samples")
        self.source = source
        self.args = args
        self._returned: list[Group] = []
        self._next_group_index = 0
        self._next_index = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __len__(self) -> int:
        """Prompts per epoch; 0 where the source does not say."""
        return len(self.source) if _has(self.source, "__len__") else 0

    @property
    def num_rollout_per_epoch(self) -> int:
        """Rollouts that one pass over the prompts takes, as the source says or as its length does."""
        if _has(self.source, "num_rollout_per_epoch"):
            return int(self.source.num_rollout_per_epoch)
        if not _has(self.source, "__len__"):
            raise UserError(f"{FLAG} {self.args.data_source_path} has no length for --num-epoch: give --num-rollout")
        return max(1, len(self.source) // self.args.rollout_batch_size)

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next groups: those put back first, then new ones."""
        groups = self._from_buffer(num_samples)
        if len(groups) < num_samples:
            groups += [self._group(item) for item in self.source.get_samples(num_samples - len(groups))]
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back: into the source where it takes them, else into a buffer here."""
        if _has(self.source, "add_samples"):
            self.source.add_samples(samples)
        else:
            self._returned.extend(samples)

    def save(self, rollout_id: int) -> None:
        """Save the source's position, if it knows how."""
        if _has(self.source, "save"):
            self.source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a saved position, if the source knows how."""
        if _has(self.source, "load"):
            self.source.load(rollout_id)
        elif rollout_id is not None and rollout_id >= 0:
            logger.warning("%s %s cannot load a position: prompts start over", FLAG, self.args.data_source_path)

    def _from_buffer(self, num_samples: int) -> list[Group]:
        taken, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        wanted = num_samples - len(taken)
        if wanted and _has(self.source, "buffer_filter") and _has(self.source, "buffer") and self.source.buffer:
            chosen = list(self.source.buffer_filter(self.args, self.source.buffer, wanted))
            if len(chosen) > wanted:
                raise UserError(
                    f"{FLAG} {self.args.data_source_path}: buffer_filter returned {len(chosen)} groups when asked for "
                    f"at most {wanted}"
                )
            remove_chosen(self.source.buffer, chosen)
            taken += chosen
        return taken

    def _group(self, item: Any) -> Group:
        group = [copy.deepcopy(item) for _ in range(self.args.n_samples_per_prompt)] if _is_sample(item) else item
        if not isinstance(group, list) or not group or not all(map(_is_sample, group)):
            raise UserError(
                f"{FLAG} {self.args.data_source_path}: get_samples must return groups (lists of Sample) or samples, "
                f"not {item!r:.80}"
            )
        if group[0].group_index is None:
            for sample in group:
                sample.group_index = self._next_group_index
            self._next_group_index += 1
        for sample in group:
            if sample.index is None:
                sample.index = self._next_index
                self._next_index += 1
        return group


def _is_sample(item: Any) -> bool:
    return isinstance(item, Sample)


def _has(source: Any, name: str) -> bool:
    return hasattr(source, name)
