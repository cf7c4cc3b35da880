"""A user's data source, made whole.

Invariant: whatever class `--data-source-path` names, the run sees groups of `Sample`s with indices, a buffer that takes
groups back and serves them first, `save` and `load`, and a position to which a restarted run returns. What the class
has itself is used; only what it lacks is added.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

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
    remove_chosen,
    samples_of,
)
from slime.data.source_state import latest_state_path, read_state, state_path, write_state
from slime.errors import UserError

logger = logging.getLogger(__name__)

FLAG = "--data-source-path"


def make_data_source(args: Any, plugin_args: Any = None) -> Any:
    """The data source of a run: our own ones as they are, any other one made whole.

    `args` is what the run goes by, `plugin_args` what the user's classes and filters get.
    """
    plugin_args = args if plugin_args is None else plugin_args
    factory = load_plugin(args.data_source_path, FLAG)
    is_own = factory in (RolloutDataSource, RolloutDataSourceWithBuffer)
    given = copy.copy(plugin_args) if is_own else plugin_args  # what plugins write later does not reach our own
    source = factory() if takes_nothing(factory) else factory(given)
    if isinstance(source, RolloutDataSourceWithBuffer):
        source.plugin_args = plugin_args
    return source if isinstance(source, RolloutDataSource) else UserSource(source, args, plugin_args)


class UserSource:
    """The parts of a data source that a user's class may leave out, around the object itself.

    `get_samples(n)` may return groups or single samples; a single one stands for `n_samples_per_prompt` of its kind.
    """

    def __init__(self, source: Any, args: Any, plugin_args: Any = None) -> None:
        if not _has(source, "get_samples"):
            raise UserError(f"{FLAG} {args.data_source_path} made a {type(source).__name__} without get_samples")
        self.source = source
        self.args = args
        self._plugin_args = args if plugin_args is None else plugin_args
        self._returned: list[Group] = []
        self._handed_out = 0
        self._next_group_index = 0
        self._next_index = 0
        self._observed = -1
        """The last rollout whose groups the source has seen."""
        if observes(source):
            self.observe_samples = self._observe

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
            groups += self._new(num_samples - len(groups))
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back: into the source where it takes them, else into a buffer here."""
        if _has(self.source, "add_samples"):
            self.source.add_samples(samples)
        else:
            self._returned.extend(samples)

    def _observe(self, rollout_id: int, groups: list[Group]) -> None:
        self.source.observe_samples(rollout_id, groups)
        self._observed = rollout_id

    def stands_before(self, rollout_id: int) -> bool:
        """Whether the source observes, and was loaded where it had not seen this rollout yet."""
        return observes(self.source) and self._observed < rollout_id

    def save(self, rollout_id: int) -> None:
        """Save the source's position: as it does that itself, or what its `state_dict` says."""
        if _has(self.source, "save"):
            self.source.save(rollout_id)
        elif self._has_state() and self.args.save is not None:
            write_state(state_path(self.args.save, rollout_id), self.position())

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from a saved position, if the source knows how."""
        if _has(self.source, "load"):
            self.source.load(rollout_id)
        elif (path := self._saved_state(rollout_id)) is not None:
            self._take(read_state(path), str(path))
        elif rollout_id is not None and rollout_id >= 0:
            logger.warning("%s %s cannot load a position: prompts start over", FLAG, self.args.data_source_path)

    def position(self) -> dict[str, Any]:
        """Where the source stands: its own state if it has one, else the number of groups it has handed out."""
        position: dict[str, Any] = {
            "handed_out": self._handed_out,
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
        }
        if observes(self.source):
            position["observed"] = self._observed
        if self._has_state():
            name = "position" if _has(self.source, "position") else "state_dict"
            state = self.source.position() if name == "position" else self.source.state_dict()
            position["source"] = to_json(state, f"{FLAG} {self.args.data_source_path}: {name}()")
        return position

    def go_on(self, position: dict[str, Any], rollout_id: int, saved: dict[str, Any] | None) -> None:
        """Stand at `position`, without anything in a buffer; `saved` is the position when `rollout_id` was saved.

        A source without a state of its own is loaded where it was saved, and what it has handed out since then is
        taken from it once more and thrown away. Batches that it saw since then it will see again (`stands_before`).
        """
        if self._has_state() and "source" in position:
            self._take(position, "the journal")
        else:
            known = 0
            if _has(self.source, "load"):
                self.source.load(rollout_id)
                known = self._known_since(rollout_id, position, saved)
            if _has(self.source, "buffer") and isinstance(self.source.buffer, list):
                self.source.buffer.clear()
            self._handed_out = known
            self._skip_to(int(position["handed_out"]))
            self._observed = max(rollout_id, int((saved or {}).get("observed", -1)))
            self._count_from(position)
        self._returned.clear()

    def _take(self, position: dict[str, Any], origin: str) -> None:
        """Stand at a position that has the source's own state."""
        try:
            self.source.load_state_dict(from_json(position["source"]))
            self._observed = int(position.get("observed", -1))
            self._count_from(position)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{origin}: is no position of {FLAG} {self.args.data_source_path} ({error!r})") from error

    def _count_from(self, position: dict[str, Any]) -> None:
        self._handed_out = int(position["handed_out"])
        self._next_group_index = int(position["next_group_index"])
        self._next_index = int(position["next_index"])

    def _saved_state(self, rollout_id: int | None) -> Path | None:
        """The file that `save` wrote of a source's state; None where there is none, or nothing to give it to."""
        if self.args.load is None or rollout_id == -1 or not self._has_state():
            return None
        path = latest_state_path(self.args.load) if rollout_id is None else state_path(self.args.load, rollout_id)
        return path if path is not None and path.is_file() else None

    def buffered(self) -> list[Group]:
        """Groups that were put back, here or into the source, as far as one can see."""
        inner = self.source.buffer if _has(self.source, "buffer") else []
        groups = [item for item in inner if isinstance(item, list)] if isinstance(inner, list) else []
        return [*self._returned, *groups]

    def _skip_to(self, handed_out: int) -> None:
        """Throw away what the source handed out in an earlier life; an exhausted one has no more to give."""
        for _ in range(2 * handed_out):
            if self._handed_out >= handed_out or not self._new(handed_out - self._handed_out):
                return

    def _known_since(self, rollout_id: int, position: dict[str, Any], saved: dict[str, Any] | None) -> int:
        """Groups that a loaded source had handed out when it was saved."""
        if rollout_id < 0:
            return 0
        if saved is None:
            logger.warning(
                "%s %s: how far it was when rollout %d was saved is unknown, prompts may come twice",
                FLAG,
                self.args.data_source_path,
                rollout_id,
            )
            return int(position["handed_out"])
        return int(saved["handed_out"])

    def _has_state(self) -> bool:
        """Whether a state of the source says all: one with a buffer of its own may hold groups in it."""
        if not _has(self.source, "load_state_dict"):
            return False
        return _has(self.source, "position") or (
            _has(self.source, "state_dict") and not _has(self.source, "add_samples")
        )

    def _new(self, num_samples: int) -> list[Group]:
        """Groups from the source; those that it had been given back are not counted as handed out."""
        groups = [self._group(item) for item in self.source.get_samples(num_samples)]
        self._handed_out += sum(1 for group in groups if _is_new(group))
        return groups

    def _from_buffer(self, num_samples: int) -> list[Group]:
        taken, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        wanted = num_samples - len(taken)
        if wanted and _has(self.source, "buffer_filter") and _has(self.source, "buffer") and self.source.buffer:
            chosen = list(self.source.buffer_filter(self._plugin_args, self.source.buffer, wanted))
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
        if not is_group(group):
            raise UserError(
                f"{FLAG} {self.args.data_source_path}: get_samples must return groups (lists of Sample) or samples, "
                f"not {item!r:.80}"
            )
        self._next_group_index, self._next_index = fill_in_indices(group, self._next_group_index, self._next_index)
        return group


def _is_sample(item: Any) -> bool:
    return isinstance(item, Sample)


def _is_new(group: Group) -> bool:
    return all(sample.journal_id is None for sample in samples_of(group))


def _has(source: Any, name: str) -> bool:
    return hasattr(source, name)
