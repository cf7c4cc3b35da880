"""`Sample`: the record of one prompt and response, used from prompt file to gradient.

Invariant: every per-token column of the response (loss mask, log-probs, top-p spans) has exactly `response_length`
entries, and the response is the tail of `tokens`. `append_response_tokens` preserves this: it validates all arguments
before it changes the sample, so a rejected call leaves the sample unchanged.

Columns are stored as packed arrays and read as lists (`slime.data.columns`); a list that was read grows with the
response. Code of this project reads `token_array()` and similar methods, which leave columns packed.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data import counters
from slime.data.columns import (
    Column,
    ColumnOwner,
    PackedArray,
    constant_mask,
    exact_floats,
    exact_ints,
    is_constant,
    packed,
    same_numbers,
)
from slime.data.counters import PrefixCacheInfo, SpecInfo, VersionRuns, extend_version_runs, oldest_version
from slime.data.routed_experts import decode_expert_ids
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from argparse import Namespace

    from slime.config import Config

__all__ = ["PrefixCacheInfo", "Reward", "Sample", "SampleStatus", "SpecInfo"]

Reward = float | JsonObject

ArrayMover = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Moves arrays into their final memory and returns them in the same order."""


class SampleStatus(Enum):
    """The life-cycle state of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_Numbers = PackedArray | list[float]


_STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass(eq=False)
class Sample(ColumnOwner):
    """One prompt with one response and the record of how they were generated and scored."""

    Status = SampleStatus
    SpecInfo = counters.SpecInfo
    PrefixCacheInfo = counters.PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    """Text or chat messages; any value of the row if a user function reads it."""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, object] | None = None
    multimodal_train_inputs: dict[str, object] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: JsonObject = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Reward | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    version_spans: VersionRuns = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: np.ndarray | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    failure: str | None = None
    metadata: JsonObject = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    task: str | None = None
    """The name of the prompt's dataset in `--prompt-config`."""
    train_metadata: JsonObject | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: counters.SpecInfo = field(default_factory=counters.SpecInfo)
    prefix_cache_info: counters.PrefixCacheInfo = field(default_factory=counters.PrefixCacheInfo)
    journal_id: int | None = None
    """The row id of this sample in the run's journal; copies keep it."""

    def __post_init__(self) -> None:
        self._own_columns()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        if mine.keys() != theirs.keys():
            return False
        for key, left in mine.items():
            right = theirs[key]
            if isinstance(left, PackedArray) or isinstance(right, PackedArray):
                equal = same_numbers(left, right)
            elif isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
                equal = left is not None and right is not None and np.array_equal(left, right)
            else:
                equal = bool(left == right)
            if not equal:
                return False
        return True

    def __copy__(self) -> Sample:
        """Return a copy with its own columns: appending to one copy does not extend the other."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._own_columns()
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Sample:
        """Deep copy that skips immutable values, which most fields of most samples hold."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            if type(value) not in _UNCHANGING:
                is_numbers = name in COLUMNS and type(value) is list
                value = list(value) if is_numbers else copy.deepcopy(value, memo)
            twin.__dict__[name] = value
        return twin

    def _own_columns(self) -> None:
        """Copy column lists shared with another sample (after a copy or `dataclasses.replace`)."""
        for name in COLUMNS:
            if type(column := self.__dict__[name]) is list:
                self.__dict__[name] = list(column)

    __hash__ = None  # type: ignore[assignment]  # mutable, like any dataclass with value equality

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        mask = self.__dict__["loss_mask"]
        if mask is None:
            return self.response_length
        if not isinstance(mask, PackedArray):
            return sum(mask)
        return mask.array.sum().item() if mask.total is None else mask.total

    @property
    def total_length(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.__dict__["tokens"])

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the response."""
        return self.total_length - self.response_length

    @property
    def oldest_weight_version(self) -> int | None:
        """The oldest weight version that sampled a trained token; None when it is unknown."""
        return oldest_version(self.version_spans, self.loss_mask_array(), self.weight_versions)

    def token_array(self) -> np.ndarray:
        """Return `tokens` as a read-only array; the column is unchanged."""
        return np.empty(0, dtype=np.int32) if (tokens := self.column_array("tokens")) is None else tokens

    def loss_mask_array(self) -> np.ndarray | None:
        """Return `loss_mask` as a read-only array."""
        return self.column_array("loss_mask")

    def column_array(self, name: str) -> np.ndarray | None:
        """Return one of `COLUMNS` as a read-only array, without loss; the column is unchanged."""
        value = self.__dict__[name]
        if value is None:
            return None
        held = value if isinstance(value, PackedArray) else packed(value, narrow=name == "loss_mask")
        return np.asarray(value) if held is None else held.array

    def compact(self) -> None:
        """Pack columns that were read or written as lists; call it after the last modification.

        Lists that callers read before are then detached from the sample. Values other than plain lists of numbers stay.
        """
        for name in COLUMNS:
            value = self.__dict__[name]
            slim = value.compacted() if isinstance(value, PackedArray) else packed(value, narrow=name == "loss_mask")
            if slim is not None:
                self.__dict__[name] = slim

    def keep_with(self, keep: ArrayMover) -> None:
        """Compact the sample, compute the column statistics that training needs, and move columns with `keep`."""
        self.compact()
        held = {name: column for name in TRAINED_ON if isinstance(column := self.__dict__[name], PackedArray)}
        for column in held.values():
            column.look()
        real = {name: column for name, column in held.items() if len(column) and not is_constant(column.array)}
        experts = self.rollout_routed_experts
        arrays = [column.array for column in real.values()]
        kept = keep(arrays if experts is None else [*arrays, experts])
        for (name, column), same in zip(real.items(), kept, strict=False):
            self.__dict__[name] = column.moved(same)
        if experts is not None:
            self.rollout_routed_experts = kept[-1]

    def get_reward_value(self, args: Config | Namespace) -> Any:
        """Return the reward; for a dict its `--reward-key` entry, or the dict itself if no key is set."""
        return self.reward_number(args) if isinstance(self.reward, dict) and args.reward_key else self.reward

    def reward_number(self, args: Config | Namespace, *, evaluation: bool = False) -> float:
        """Return the reward as a number; a dict is read at `--reward-key` (`--eval-reward-key` first in evaluation)."""
        key = (args.eval_reward_key if evaluation else None) or args.reward_key
        if isinstance(self.reward, dict):
            if not key:
                raise UserError(f"the reward is a dict with keys {sorted(self.reward)}; name one with --reward-key")
            if key not in self.reward:
                raise UserError(f"--reward-key {key!r} is not in the reward, which has keys {sorted(self.reward)}")
            return self.reward[key]
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward yet (status {self.status.value})")
        return self.reward

    def to_dict(self) -> JsonObject:
        """Return all fields and extra attributes; arrays and containers are shared, packed columns become new lists."""
        data = {
            name: value.tolist() if isinstance(value, PackedArray) else value for name, value in self.__dict__.items()
        }
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: JsonMapping) -> Sample:
        """Invert `to_dict`; keys other than field names become attributes, which the next `to_dict` includes."""
        fields = cls.__dataclass_fields__
        known = {key: value for key, value in data.items() if key in fields}
        if "status" in known:
            known["status"] = SampleStatus(known["status"])
        for name, counter in (("spec_info", SpecInfo), ("prefix_cache_info", PrefixCacheInfo)):
            if isinstance(known.get(name), Mapping):
                known[name] = counter.from_dict(known[name])
        sample = cls(**known)
        for key, value in data.items():
            if key not in fields:
                setattr(sample, key, value)
        return sample

    def append_response_tokens(
        self,
        args: Namespace | None = None,
        *,
        tokens: Sequence[int] | np.ndarray | None = None,
        log_probs: Sequence[float] | np.ndarray | None = None,
        trainable: bool = True,
        meta_info: JsonMapping | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response; the only supported way to do so. Lists that a plugin holds grow with it.

        Trainable (sampled) tokens need `log_probs` of equal length; others (tool output, templates) must have none.
        `meta_info` is the engine's response metadata, the source of weight versions, top-p spans and routed experts.
        If it has a `finish_reason` and `update_terminal_info` is on, counters and status are updated too. The first
        `masked_until` tokens are not trained on. `args` is needed only for routed experts (`num_layers`,
        `moe_router_topk`).
        """
        new_tokens = _ids(tokens)
        meta_info = meta_info or {}
        new_log_probs = _checked_log_probs(len(new_tokens), log_probs, trainable)
        mask, old_log_probs = self._response_columns()
        top_p = self._grown_top_p(len(new_tokens), mask, trainable, meta_info)
        experts = self._spliced_experts(args, self.total_length + len(new_tokens), meta_info)

        if len(new_tokens):
            self.version_spans = extend_version_runs(
                self.version_spans, self.response_length, len(new_tokens), meta_info, sampled=trainable
            )
            self.grow("tokens", self.__dict__["tokens"], new_tokens)
            self.response_length += len(new_tokens)
            masked = int(meta_info.get("masked_until") or 0) if trainable else len(new_tokens)
            new_mask = constant_mask(int(masked <= 0), len(new_tokens))
            if 0 < masked < len(new_tokens):
                new_mask = np.ones(len(new_tokens), dtype=np.int8)
                new_mask[:masked] = 0
            self.grow("loss_mask", mask, new_mask)
            self.grow("rollout_log_probs", old_log_probs, new_log_probs)
        if top_p is not None:
            ids, offsets, new_ids, new_offsets = top_p
            self.grow("rollout_top_p_token_ids", ids, new_ids)
            self.grow("rollout_top_p_token_offsets", offsets, new_offsets)
        if experts is not None:
            self.rollout_routed_experts = experts
        if text:
            self.response += text
        if update_terminal_info and (reason := meta_info.get("finish_reason")):
            if meta_info.get("spec_verify_ct"):  # else the call was made without speculative decoding
                self.spec_info.add(meta_info)
            self.prefix_cache_info.add(meta_info)
            if meta_info.get("weight_version") is not None:
                self.weight_versions.append(str(meta_info["weight_version"]))
            kind = reason.get("type") if isinstance(reason, Mapping) else reason
            self.status = _STATUS_OF_FINISH_REASON.get(str(kind), self.status)

    def _response_columns(self) -> tuple[_Numbers, _Numbers]:
        """Return loss mask and log-probs of the response so far, filled in where absent and validated."""
        length = self.response_length
        if length > self.total_length:
            raise ValueError(f"sample has {self.total_length} tokens but response_length {length}")
        mask, log_probs = self.__dict__["loss_mask"], self.__dict__["rollout_log_probs"]
        if mask is None:
            mask = PackedArray(constant_mask(1, length))
        if len(mask) != length:
            raise ValueError(f"loss_mask has {len(mask)} entries for {length} response tokens")
        if log_probs is None:
            if trained := _sum(mask):
                raise ValueError(f"{trained} earlier trainable response tokens have no rollout_log_probs")
            log_probs = PackedArray(np.zeros(length, dtype=np.float32))
        if len(log_probs) != length:
            raise ValueError(f"rollout_log_probs has {len(log_probs)} entries for {length} tokens")
        return mask, log_probs

    def _grown_top_p(
        self, count: int, mask: _Numbers, trainable: bool, meta_info: JsonMapping
    ) -> tuple[_Numbers, _Numbers, np.ndarray, np.ndarray] | None:
        """Return ids and offsets of the top-p spans, and what `count` more tokens add to each; None without spans."""
        new_ids = _int32_field(meta_info, "top_p_token_ids", "top_p_kept_token_ids")
        new_offsets = _int32_field(meta_info, "top_p_token_offsets", "top_p_kept_token_offsets")
        if (new_ids is None) != (new_offsets is None):
            raise ValueError("meta_info has only one of top_p_token_ids and top_p_token_offsets")
        ids, offsets = self.__dict__["rollout_top_p_token_ids"], self.__dict__["rollout_top_p_token_offsets"]
        if (ids is None) != (offsets is None):
            raise ValueError("sample has only one of rollout_top_p_token_ids and rollout_top_p_token_offsets")
        if new_ids is None and ids is None:
            return None
        if ids is None or offsets is None:
            if _sum(mask):
                raise ValueError("top-p spans arrived, but earlier trainable response tokens have none")
            ids, offsets = [], PackedArray(np.zeros(len(mask) + 1, dtype=np.int32))
        last = offsets.array if isinstance(offsets, PackedArray) else offsets
        if len(offsets) != len(mask) + 1 or last[-1] != len(ids):
            raise ValueError(f"top-p offsets do not span {len(mask)} response tokens and {len(ids)} ids")
        if new_ids is None or new_offsets is None:
            if count and trainable:
                raise ValueError("this sample carries top-p spans, but the new trainable tokens come without")
            return ids, offsets, np.empty(0, np.int32), exact_ints(np.full(count, len(ids), dtype=np.int64))
        if not trainable:
            raise ValueError("non-trainable tokens must not carry top-p spans")
        if len(new_offsets) != count + 1:
            raise ValueError(f"top-p offsets have {len(new_offsets)} entries for {count} new tokens, not {count + 1}")
        if new_offsets[0] != 0 or new_offsets[-1] != len(new_ids) or (np.diff(new_offsets) < 0).any():
            raise ValueError(f"top-p offsets must rise from 0 to the number of ids ({len(new_ids)})")
        return ids, offsets, new_ids, exact_ints(new_offsets[1:].astype(np.int64) + len(ids))

    def _spliced_experts(self, args: Namespace | None, total_tokens: int, meta_info: JsonMapping) -> np.ndarray | None:
        """Return routed experts `[total_tokens - 1, layers, topk]` after this engine call; None if it reports none."""
        if meta_info.get("routed_experts") is None:
            return None
        flat = decode_expert_ids(meta_info["routed_experts"])
        if args is None:
            raise ValueError("routed experts need args with num_layers and moe_router_topk")
        layers, topk = int(args.num_layers), int(args.moe_router_topk)
        if flat.size % (layers * topk):
            raise ValueError(
                f"{flat.size} routed-expert entries are not a multiple of {layers} layers x {topk} experts"
            )
        rows = flat.reshape(-1, layers, topk)
        start = int(meta_info.get("routed_experts_start_len") or 0)
        if start:
            known = 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)
            if self.rollout_routed_experts is None or start > known:
                raise ValueError(f"routed experts start at row {start}, but only {known} rows are known")
            rows = np.concatenate([self.rollout_routed_experts[:start], rows])
        if len(rows) != total_tokens - 1:
            raise ValueError(f"routed experts have {len(rows)} rows for {total_tokens} tokens, not {total_tokens - 1}")
        return rows


_UNCHANGING = frozenset({type(None), bool, int, float, str, SampleStatus, PackedArray})

COLUMNS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
"""The fields that hold numbers per token."""

TRAINED_ON = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
"""The columns that trainers receive."""

for _name in COLUMNS:
    setattr(Sample, _name, Column(_name))


def _ids(tokens: Iterable[int] | np.ndarray | None) -> np.ndarray:
    """Convert token ids to a new array."""
    if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind == "i":
        return exact_ints(tokens.copy())
    given = [] if tokens is None else list(tokens)
    if (held := packed(given)) is None or held.array.dtype.kind != "i":
        given = [int(token) for token in given]
        if (held := packed(given)) is None and given:
            raise ValueError(f"token ids must have at most 64 bits, not {max(given, key=abs)}")
    return np.empty(0, dtype=np.int32) if held is None else held.array


def _checked_log_probs(count: int, log_probs: Sequence[float] | np.ndarray | None, trainable: bool) -> np.ndarray:
    if not trainable:
        if log_probs is not None:
            raise ValueError("non-trainable tokens must not carry log_probs (their mask is 0)")
        return np.zeros(count, dtype=np.float32)
    if log_probs is None:
        if count:
            raise ValueError(f"{count} trainable tokens need log_probs of the same length")
        return np.empty(0, dtype=np.float32)
    if len(log_probs) != count:
        raise ValueError(f"{count} trainable tokens came with {len(log_probs)} log_probs")
    if isinstance(log_probs, np.ndarray) and log_probs.ndim == 1:
        if log_probs.dtype == np.float32:
            return log_probs.copy()
        if log_probs.dtype == np.float64:
            return exact_floats(log_probs.copy())
    held = packed(log_probs)
    if held is not None and held.array.dtype.kind == "f":
        return held.array
    return exact_floats(np.array([float(value) for value in log_probs], dtype=np.float64))


def _sum(column: _Numbers) -> float:
    return column.array.sum().item() if isinstance(column, PackedArray) else sum(column)


def _int32_field(meta_info: JsonMapping, *names: str) -> np.ndarray | None:
    """Return the first of `names` that is present as a flat int32 array; the wire form is base64 of int32 bytes."""
    for name in names:
        value = meta_info.get(name)
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value), dtype=np.int32)
        if value is not None:
            return np.array(value, dtype=np.int32).reshape(-1)
    return None
