"""`UserSource`: adapter that adds missing features to a user's data source.

Invariant: for every class named by `--data-source-path`, the run sees groups of `Sample`s with indices, a buffer that
takes groups back and serves them first, `save` and `load`, and a position to which a restarted run returns. The class's
own methods are used where they exist; only missing ones are added.
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from typing import TYPE_CHECKING, Any, cast

from slime.config.plugins import load_plugin, takes_nothing
from slime.data.json_samples import from_json, to_json
from slime.data.sample import Sample
from slime.data.source import (
    Group,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    fill_in_indices,
    is_group,
    observes,
    remove_by_identity,
    samples_of,
)
from slime.data.source_state import find_state, read_state, state_path, write_state
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from slime.config import Config

logger = logging.getLogger(__name__)

FLAG = "--data-source-path"


def make_data_source(args: Config | Namespace, plugin_args: Namespace | None = None) -> RolloutDataSource | UserSource:
    """Create the data source of a run; classes other than our own are wrapped in `UserSource`.

    `args` is the configuration of the run, `plugin_args` the namespace that user classes and filters receive.
    """
    plugin_args = cast(Namespace, args) if plugin_args is None else plugin_args
    factory = load_plugin(args.data_source_path, FLAG)
    is_own = factory in (RolloutDataSource, RolloutDataSourceWithBuffer)
    given = copy.copy(plugin_args) if is_own else plugin_args  # later writes of plugins do not reach our own classes
    source = factory() if takes_nothing(factory) else factory(given)
    if isinstance(source, RolloutDataSourceWithBuffer):
        source.plugin_args = plugin_args
    return source if isinstance(source, RolloutDataSource) else UserSource(source, args, plugin_args)


class UserSource:
    """Wraps a user's data source and adds the methods that it lacks.

    `get_samples(n)` may return groups or single samples; a single one is copied `n_samples_per_prompt` times.
    """

    def __init__(self, source: Any, args: Config | Namespace, plugin_args: Namespace | None = None) -> None:
        if not hasattr(source, "get_samples"):
            raise UserError(f"{FLAG} {args.data_source_path} made a {type(source).__name__} without get_samples")
        self.source = source
        self.args = args
        self._plugin_args = args if plugin_args is None else plugin_args
        self._returned: list[Group] = []
        self._handed_out = 0
        self._next_group_index = 0
        self._next_index = 0
        self._observed = -1
        """The last rollout whose groups the source has observed."""
        if observes(source):
            self.observe_samples = self._observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __len__(self) -> int:
        """Return the number of prompts per epoch; 0 if the source has no length."""
        return len(self.source) if hasattr(self.source, "__len__") else 0

    @property
    def num_rollout_per_epoch(self) -> int:
        """The number of rollouts in one pass over the prompts, from the source or from its length."""
        if hasattr(self.source, "num_rollout_per_epoch"):
            return int(self.source.num_rollout_per_epoch)
        if not hasattr(self.source, "__len__"):
            raise UserError(f"{FLAG} {self.args.data_source_path} has no length for --num-epoch: give --num-rollout")
        return max(1, len(self.source) // self.args.rollout_batch_size)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next groups: returned ones first, then new ones."""
        groups, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        wanted = num_samples - len(groups)
        if wanted and hasattr(self.source, "buffer_filter") and hasattr(self.source, "buffer") and self.source.buffer:
            chosen = list(self.source.buffer_filter(self._plugin_args, self.source.buffer, wanted))
            if len(chosen) > wanted:
                raise UserError(
                    f"{FLAG} {self.args.data_source_path}: buffer_filter returned {len(chosen)} groups when asked for "
                    f"at most {wanted}"
                )
            remove_by_identity(self.source.buffer, chosen)
            groups += chosen
        if len(groups) < num_samples:
            groups += self._new(num_samples - len(groups))
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, in the source if it supports that, else in a buffer here."""
        if hasattr(self.source, "add_samples"):
            self.source.add_samples(samples)
        else:
            self._returned.extend(samples)

    def _observe(self, rollout_id: int, groups: list[Group]) -> None:
        self.source.observe_samples(rollout_id, groups)
        self._observed = rollout_id

    def has_not_observed(self, rollout_id: int) -> bool:
        """True if the source observes rollouts and its loaded state has not observed this one yet."""
        return observes(self.source) and self._observed < rollout_id

    def save(self, rollout_id: int) -> None:
        """Save the source's position with its own `save`, or else its `state_dict`."""
        if hasattr(self.source, "save"):
            self.source.save(rollout_id)
        elif self._has_state() and self.args.save is not None:
            write_state(state_path(self.args.save, rollout_id), self.position())

    def load(self, rollout_id: int | None = None) -> None:
        """Resume from a saved position, if the source supports it."""
        if hasattr(self.source, "load"):
            self.source.load(rollout_id)
            return
        path = None
        if self.args.load is not None and rollout_id != -1 and self._has_state():
            path = find_state(self.args.load, rollout_id)
        if path is not None:
            self._take(read_state(path), str(path))
        elif rollout_id is not None and rollout_id >= 0:
            logger.warning("%s %s cannot load a position: prompts start over", FLAG, self.args.data_source_path)

    def position(self) -> JsonObject:
        """Return the number of groups handed out so far, and the source's own state if it has one."""
        position: JsonObject = {
            "handed_out": self._handed_out,
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
        }
        if observes(self.source):
            position["observed"] = self._observed
        if self._has_state():
            name = "position" if hasattr(self.source, "position") else "state_dict"
            state = self.source.position() if name == "position" else self.source.state_dict()
            position["source"] = to_json(state, f"{FLAG} {self.args.data_source_path}: {name}()")
        return position

    def go_on(self, position: JsonObject, rollout_id: int, saved: JsonObject | None) -> None:
        """Resume at `position` with empty buffers; `saved` is the position at the checkpoint of `rollout_id`.

        A source without its own state is loaded from the checkpoint; the groups it has handed out since are then
        requested again and discarded. It observes the batches since then a second time (`has_not_observed`).
        """
        if self._has_state() and "source" in position:
            self._take(position, "the journal")
        else:
            known = 0
            if hasattr(self.source, "load"):
                self.source.load(rollout_id)
                if rollout_id >= 0 and saved is None:
                    logger.warning(
                        "%s %s: its position at the checkpoint of rollout %d is unknown, prompts may repeat",
                        FLAG,
                        self.args.data_source_path,
                        rollout_id,
                    )
                    known = int(position["handed_out"])
                elif rollout_id >= 0 and saved is not None:
                    known = int(saved["handed_out"])
            if hasattr(self.source, "buffer") and isinstance(self.source.buffer, list):
                self.source.buffer.clear()
            self._handed_out = known
            handed_out = int(position["handed_out"])
            for _ in range(2 * handed_out):  # an exhausted source returns fewer groups or none
                if self._handed_out >= handed_out or not self._new(handed_out - self._handed_out):
                    break
            self._observed = max(rollout_id, int((saved or {}).get("observed", -1)))
            self._count_from(position)
        self._returned.clear()

    def _take(self, position: JsonObject, origin: str) -> None:
        """Resume at a position that includes the source's own state."""
        try:
            self.source.load_state_dict(from_json(position["source"]))
            self._observed = int(position.get("observed", -1))
            self._count_from(position)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{origin}: not a position of {FLAG} {self.args.data_source_path} ({error!r})") from error

    def _count_from(self, position: JsonObject) -> None:
        self._handed_out = int(position["handed_out"])
        self._next_group_index = int(position["next_group_index"])
        self._next_index = int(position["next_index"])

    def buffered(self) -> list[Group]:
        """Return the groups that were put back, here or into a visible buffer of the source."""
        inner = self.source.buffer if hasattr(self.source, "buffer") else []
        groups = [item for item in inner if isinstance(item, list)] if isinstance(inner, list) else []
        return [*self._returned, *groups]

    def _has_state(self) -> bool:
        """True if the source's own state is complete; `state_dict` of a source with a buffer may include groups."""
        if not hasattr(self.source, "load_state_dict"):
            return False
        return hasattr(self.source, "position") or (
            hasattr(self.source, "state_dict") and not hasattr(self.source, "add_samples")
        )

    def _new(self, num_samples: int) -> list[Group]:
        """Get groups from the source; groups that were put back into it do not count as handed out."""
        groups: list[Group] = []
        for item in self.source.get_samples(num_samples):
            group: object = item
            if isinstance(item, Sample):
                group = [copy.deepcopy(item) for _ in range(self.args.n_samples_per_prompt)]
            if not is_group(group):
                raise UserError(
                    f"{FLAG} {self.args.data_source_path}: get_samples must return groups (lists of Sample) or "
                    f"samples, not {item!r:.80}"
                )
            self._next_group_index, self._next_index = fill_in_indices(group, self._next_group_index, self._next_index)
            groups.append(group)
        self._handed_out += sum(all(sample.journal_id is None for sample in samples_of(group)) for group in groups)
        return groups
