"""Data sources: supply prompt groups to rollout and take unfinished groups back.

Invariant: within an epoch every prompt is handed out once, in an order that `--rollout-seed` and the epoch determine;
`state_dict` holds everything needed to resume at the same position, including buffered groups.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard, cast

from slime.config.config import FLAG_SPECS
from slime.config.plugins import load_function
from slime.data.chat_template import load_tokenizer, model_context_length
from slime.data.json_samples import from_json, to_json
from slime.data.mixture import Mixture, MixtureMember, reading
from slime.data.prompt_rows import USUAL_PROMPT_KEY, label_use_of_run, takes_any_prompt
from slime.data.prompts import PromptDataset, StreamedPromptTooLong, log_dropped
from slime.data.readers import split_slice
from slime.data.sample import Sample
from slime.data.source_state import (
    SampleRecords,
    buffer_from_state,
    buffer_state,
    find_state,
    read_state,
    state_path,
    write_state,
)
from slime.errors import UserError
from slime.storage.json_types import JsonObject

logger = logging.getLogger(__name__)

Group = list[Sample] | list[Sample | list[Sample]]
"""All samples of one prompt; a member that is a list is the fan-out of one sample."""
BufferFilter = Callable[[Namespace, int | None, list[Group], int], list[Group]]


class DataSource(ABC):
    """Interface of a data source; `--data-source-path` also accepts any class with `get_samples`."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next groups."""

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Save the position after a rollout."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Resume from a saved position."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of prompts per epoch."""


class RolloutDataSource(DataSource):
    """Hands out prompt groups from `--prompt-data`, epoch after epoch, or from the datasets of `--prompt-config`.

    The next prompt is `dataset.samples[sample_offset]`; subclasses may replace the dataset or its samples.
    """

    rollout_id: int | None = None
    """The rollout that requests samples; set by the caller of the rollout function."""
    _dropped_in_epoch = 0

    def __init__(self, args: Namespace) -> None:
        is_whole = all(hasattr(args, name) for name in FLAG_SPECS)
        self.args = args = args if is_whole else cast(Namespace, ArgsWithDefaults(args))
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: JsonObject = {}
        self.dataset: Any = None if args.disable_rollout_global_dataset else _open_dataset(args)
        self._follow_epoch()

    def __len__(self) -> int:
        """Return the number of prompts per epoch; 0 without a dataset."""
        return 0 if self.dataset is None else len(self.dataset)

    @property
    def num_rollout_per_epoch(self) -> int:
        """The number of rollouts in one pass over the prompts, at least 1."""
        return max(1, len(self) // self.args.rollout_batch_size)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next `num_samples` groups of `n_samples_per_prompt` new samples each."""
        groups: list[Group] = []
        for _ in range(num_samples):
            prototype = self.next_prompt()
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(prototype)
                sample.group_index = self.sample_group_index
                sample.index = self.sample_index
                self.sample_index += 1
                group.append(sample)
            self.sample_group_index += 1
            groups.append(group)
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Raise an error: only sources with a buffer take groups back."""
        raise UserError(
            f"{type(self).__name__} has no buffer to put samples back into; use RolloutDataSourceWithBuffer"
        )

    def save(self, rollout_id: int) -> None:
        """Save the position under `--save`; without that flag nothing is saved."""
        if self.args.save is not None:
            write_state(state_path(self.args.save, rollout_id), self.state_dict())

    def load(self, rollout_id: int | None = None) -> None:
        """Resume from the position saved under `--load` for `rollout_id` (None: the latest; -1: a fresh start)."""
        if self.args.load is None or rollout_id == -1:
            return
        path = find_state(self.args.load, rollout_id)
        if path is None:
            logger.warning(
                "no saved data position for rollout %s under %s: prompts start over", rollout_id, self.args.load
            )
            return
        self.load_state_dict(read_state(path), origin=str(path))

    def state_dict(self) -> JsonObject:
        """Return the position as JSON values."""
        return {
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": to_json(self.metadata, "data source metadata"),
            "dataset": self._dataset_identity(),
            "order": {"rollout_seed": self.args.rollout_seed, "rollout_shuffle": self.args.rollout_shuffle},
            **({"mixture": self.dataset.state_dict()} if isinstance(self.dataset, Mixture) else {}),
        }

    def position(self) -> JsonObject:
        """Return the state without buffered groups; `load_state_dict` accepts it and leaves the buffer empty."""
        return self.state_dict()

    def load_state_dict(self, state: JsonObject, *, origin: str = "the saved data position") -> None:
        """Resume at a position; a `UserError` if it belongs to other data."""
        try:
            self._check_same_dataset(state["dataset"], origin)
            if state["order"] != self.state_dict()["order"]:
                logger.warning("%s was saved with %s: prompts now come in another order", origin, state["order"])
            self.epoch_id = int(state["epoch_id"])
            self.sample_offset = int(state["sample_offset"])
            self.sample_group_index = int(state["sample_group_index"])
            self.sample_index = int(state["sample_index"])
            self.metadata = dict(from_json(state["metadata"]))
            if isinstance(self.dataset, Mixture):
                self.dataset.load_state_dict(state["mixture"], origin=origin)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{origin}: not a position of this kind of data source ({error!r})") from error
        self._follow_epoch()

    def numbered(self, groups: object) -> list[Group]:
        """Validate the groups that a subclass's `get_samples` returned, and fill in missing sample indices."""
        if not isinstance(groups, list) or not all(map(is_group, groups)):
            raise UserError(
                f"{type(self).__name__}.get_samples must return a list of groups, each a list of Sample, not "
                f"{groups!r:.80}"
            )
        for group in groups:
            self.sample_group_index, self.sample_index = fill_in_indices(
                group, self.sample_group_index, self.sample_index
            )
        return groups

    def update_metadata(self, metadata: JsonObject) -> None:
        """Update the metadata that is saved with the position."""
        self.metadata.update(metadata)

    def get_metadata(self) -> JsonObject:
        """Return the metadata that is saved with the position."""
        return self.metadata

    def next_prompt(self) -> Sample:
        """Return the prototype of the next group; it is shared, so copy it before changing it."""
        if self.dataset is None:
            return Sample()
        if isinstance(self.dataset, Mixture):
            if self.sample_offset >= len(self.dataset):
                self._start_next_epoch()
            self.sample_offset += 1
            return self.dataset.next_prompt()
        for _ in range(2 * len(self.dataset)):
            if self.sample_offset >= len(self.dataset.samples):
                self._start_next_epoch()
            self.sample_offset += 1
            try:
                prototype: Sample = self.dataset.samples[self.sample_offset - 1]
                return prototype
            except StreamedPromptTooLong:
                self._dropped_in_epoch += 1
        if not isinstance(self.dataset, PromptDataset) or not len(self.dataset):
            raise UserError(f"{type(self).__name__}: its dataset has no samples to hand out")
        raise UserError(
            f"prompt data {self.dataset.path}: every prompt is longer than {self.dataset.max_prompt_len} tokens; "
            "raise --rollout-max-prompt-len"
        )

    def _start_next_epoch(self) -> None:
        if self._dropped_in_epoch:
            log_dropped(self._dropped_in_epoch, len(self.dataset), self.dataset.max_prompt_len)
        self._dropped_in_epoch = 0
        self.epoch_id += 1
        self.sample_offset = 0
        self._follow_epoch()

    def _follow_epoch(self) -> None:
        """Put the dataset into the order of the current epoch."""
        if self.dataset is not None and self.args.rollout_shuffle and not isinstance(self.dataset, Mixture):
            self.dataset.shuffle(self.epoch_id)

    def _dataset_identity(self) -> JsonObject | None:
        if self.dataset is None or isinstance(self.dataset, PromptDataset):
            return None if self.dataset is None else self.dataset.identity()
        if isinstance(self.dataset, Mixture):
            return {"path": f"the datasets of {self.args.prompt_config}"}
        return {"path": str(self.args.prompt_data), "length": len(self.dataset), "file_bytes": None}

    def _check_same_dataset(self, saved: JsonObject | None, origin: str) -> None:
        current = self._dataset_identity()
        if (saved is None) != (current is None):
            raise UserError(
                f"{origin}: was saved {'without' if saved is None else 'with'} a prompt dataset, unlike this run"
            )
        if saved is None or current is None:
            return
        if "length" not in saved or "length" not in current:
            if saved.keys() == current.keys():
                return  # two mixtures, which check each of their datasets
            raise UserError(
                f"{origin}: is a position in {saved['path']}, but this run reads {current['path']}; resume with the "
                "same data or start without --load"
            )
        if _name_and_slice(saved["path"]) != _name_and_slice(current["path"]):
            raise UserError(
                f"{origin}: is a position in {saved['path']}, but --prompt-data is {current['path']}; "
                "resume with the same data or start without --load"
            )
        for fact, words in (("length", "prompts"), ("file_bytes", "bytes")):
            if saved[fact] != current[fact]:
                raise UserError(
                    f"{origin}: {current['path']} had {saved[fact]} {words} when this was saved, now "
                    f"{current[fact]}; resume with the same data and prompt limits or start without --load"
                )


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Serves returned groups first, as `--buffer-filter-path` chooses them, then new ones.

    A subclass may define its own filter as a method `buffer_filter(self, args, buffer, num_samples)`.
    """

    records: SampleRecords | None = None
    """The journal that holds the buffered groups; the saved state then refers to its rows instead of copying them."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.plugin_args = args
        """The `args` of the filter."""
        self.buffer: list[Group] = []
        self.buffer_filter: BufferFilter = pop_first
        method = getattr(type(self), "buffer_filter", None)
        if self.args.buffer_filter_path is not None:
            self.buffer_filter = load_function(
                self.args.buffer_filter_path,
                what="--buffer-filter-path",
                params=("args", "rollout_id", "buffer", "num_samples"),
            )
        elif method is not None:

            def choose(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
                chosen = list(method(self, args, buffer, num_samples))
                remove_by_identity(buffer, chosen)
                return chosen

            self.buffer_filter = choose

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next groups, buffered ones first."""
        buffered = self._get_samples_from_buffer(num_samples)
        return buffered + super().get_samples(num_samples - len(buffered))

    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back; they are served before new prompts."""
        for group in samples:
            if not is_group(group):
                raise TypeError(
                    "add_samples takes a list of groups, each a non-empty list of Sample, or of lists of them"
                )
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        """Return the number of buffered groups."""
        return len(self.buffer)

    def state_dict(self) -> JsonObject:
        """Return the position and the buffered groups as JSON values."""
        return {**super().state_dict(), **buffer_state(self.buffer, self.records)}

    def position(self) -> JsonObject:
        """Return the state without buffered groups, also if a subclass overrides `state_dict`."""
        buffer, self.buffer = self.buffer, []
        try:
            state = self.state_dict()
        finally:
            self.buffer = buffer
        del state["buffer"]
        return state

    def load_state_dict(self, state: JsonObject, *, origin: str = "the saved data position") -> None:
        """Resume at a position with its buffered groups."""
        super().load_state_dict(state, origin=origin)
        self.buffer = buffer_from_state(state, self.records, origin)

    def _get_samples_from_buffer(self, num_samples: int) -> list[Group]:
        """Return the groups that the filter chooses from the buffer, at most `num_samples`."""
        if not self.buffer or num_samples <= 0:
            return []
        groups = self.buffer_filter(self.plugin_args, self.rollout_id, self.buffer, num_samples)
        if len(groups) > num_samples:
            raise UserError(
                f"--buffer-filter-path {self.args.buffer_filter_path}: returned {len(groups)} groups when asked for at "
                f"most {num_samples}"
            )
        return groups


def pop_first(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Default buffer filter: removes and returns the oldest groups."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def samples_of(group: Group) -> list[Sample]:
    """Return all samples of a group, including those of a fan-out."""
    return [sample for member in group for sample in ([member] if isinstance(member, Sample) else member)]


def fill_in_indices(group: Group, next_group_index: int, next_index: int) -> tuple[int, int]:
    """Fill in missing indices of a group's samples; returns the next group index and the next sample index."""
    samples = samples_of(group)
    if samples[0].group_index is None:
        for sample in samples:
            sample.group_index = next_group_index
        next_group_index += 1
    for sample in samples:
        if sample.index is None:
            sample.index = next_index
            next_index += 1
    return next_group_index, next_index


def observes(source: object) -> bool:
    """True if a data source receives finished groups with their rewards: `observe_samples(rollout_id, groups)`."""
    return callable(getattr(source, "observe_samples", None))


def is_group(group: object) -> TypeGuard[Group]:
    """True for a non-empty list of samples and fan-outs; a fan-out is a non-empty list of samples."""
    fan_outs = [member if isinstance(member, list) else [member] for member in group] if isinstance(group, list) else []
    return bool(fan_outs) and all(fan_out and all(isinstance(one, Sample) for one in fan_out) for fan_out in fan_outs)


def remove_by_identity(buffer: list[Group], chosen: list[Group]) -> None:
    """Remove chosen objects, compared by identity, from the buffer in place."""
    chosen_ids = {id(item) for item in chosen}
    buffer[:] = [item for item in buffer if id(item) not in chosen_ids]


class ArgsWithDefaults:
    """View of `args` from a user's own driver, a notebook or a test: adds `changes` and the defaults of the flags.

    Invariant: `args` that have all flags (a config, the plugin namespace of a run) are used without it. Writes go to
    `args`.
    """

    def __init__(self, args: object, changes: JsonObject | None = None) -> None:
        self.__dict__.update(_args=args, _changes=changes or {})

    def __getattr__(self, name: str) -> object:
        args, changes = self.__dict__["_args"], self.__dict__["_changes"]
        if name in changes:
            return changes[name]
        if hasattr(args, name):
            return getattr(args, name)
        if name == "disable_rollout_global_dataset":  # a parser's namespace may have the inverse flag
            names_none = getattr(args, "prompt_data", None) is None and getattr(args, "prompt_config", None) is None
            return not getattr(args, "rollout_global_dataset", not names_none)
        if name in FLAG_SPECS:
            return FLAG_SPECS[name].default
        raise AttributeError(f"the namespace has no {name}")

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_args"], name, value)


def _open_dataset(args: Namespace) -> PromptDataset | Mixture:
    if args.prompt_config is not None:
        members = ((recipe, ArgsWithDefaults(args, reading(recipe, args))) for recipe in args.train_datasets)
        return Mixture([MixtureMember(recipe, RolloutDataSource(cast(Namespace, own))) for recipe, own in members])
    if args.prompt_data is None:
        raise UserError("no prompts to roll out; name a .jsonl or .parquet file with --prompt-data")
    if args.hf_checkpoint is None:
        raise UserError("prompts are read with a model's tokenizer; name its folder with --hf-checkpoint")
    is_usual_key = not getattr(args, "is_input_key_given", True) and args.input_key == USUAL_PROMPT_KEY
    max_prompt_len = args.rollout_max_prompt_len
    if max_prompt_len is None and args.rollout_max_context_len is not None:
        max_prompt_len = args.rollout_max_context_len - 1
    return PromptDataset(
        args.prompt_data,
        tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code),
        input_key=None if is_usual_key else args.input_key,  # plugin `args` have upstream's default, not None
        label_key=args.label_key,
        label_use=label_use_of_run(args),
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        multimodal_keys=args.multimodal_keys,
        prompt_suffix=args.prompt_suffix,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_len=max_prompt_len,
        max_context=model_context_length(args.hf_checkpoint),
        any_prompt=takes_any_prompt(args),
        num_workers=args.num_data_workers,
        streaming=args.streaming_data,
        seed=args.rollout_seed,
    )


def _name_and_slice(path: str) -> tuple[str, str]:
    file, chosen = split_slice(path)
    return Path(file).name, str(chosen)
