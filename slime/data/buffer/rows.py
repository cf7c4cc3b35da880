"""Converts samples to journal rows and back, and computes row keys that detect unchanged content.

Invariant: a sample read back equals the one written. Columns are for queries with SQL; values that a column cannot hold
exactly, and all fields without a column, are in the payload, which takes precedence over the column. Fields with their
default value are omitted.

Invariants of keys: samples with equal keys have equal rows, including nested values. A key counts as written only after
the transaction that writes its row; writing a row without a key discards the row's key. Keys are valid only within this
process. They are cheap for unchanged data: a packed column is hashed once, and Python caches the hash of a text; other
values are hashed every time.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from slime.data.buffer.codec import Codec
from slime.data.columns import PackedArray, packed
from slime.data.counters import PrefixCacheInfo, SpecInfo
from slime.data.sample import COLUMNS as SAMPLE_COLUMNS
from slime.data.sample import Sample
from slime.data.source import Group
from slime.data.validation import BadSample, check_sample, reset_invalid_fields
from slime.storage.json_types import JsonMapping

_TEXT = struct.Struct("<qq")
_COUNTERS = ("spec_info", "prefix_cache_info")
_DEFAULTS = vars(Sample())


@dataclass(slots=True)
class ContentKey:
    """The key of a row's content, and whether that content is in the file yet."""

    key: bytes
    is_in_file: bool = False


def _digest(numbers: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)


COLUMNS = (
    "sample_index",
    "status",
    "reward",
    "response_length",
    "weight_versions",
    "prompt",
    "response",
    "payload",
)
"""The columns of the table `samples` after id, group_id, member and leaf."""

GENERATED = "generated"
"""Value of the column `status`: the response is complete, but the reward is missing."""
_ENDED = frozenset(status.value for status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED))

UNUSABLE = "journal: "
"""Prefix of the failure text of a sample with an unusable row."""

_INT64 = 2**63


@dataclass
class GroupLeaf:
    """One sample of a group with its place in the group and, once encoded, its columns."""

    sample: Sample
    member: int | None
    """The member index in the group; None for a sample that is in a batch without a group."""
    leaf: int | None = None
    """The index in the fan-out of one dispatched sample; None without a fan-out."""
    columns: tuple[object, ...] = ()
    content: ContentKey | None = None
    """The content key of the columns; None if changes are not tracked."""
    row_id: int = 0
    group_id: int = 0
    """The place in the journal, set when the leaf is written."""


class RowCodec:
    """Encodes samples as columns and back; `reward_key` selects the number of a dict reward for the reward column."""

    def __init__(self, reward_key: str | None = None) -> None:
        self._codec = Codec()
        self._reward_key = reward_key

    def content(self, sample: Sample) -> ContentKey:
        """Compute the content key of a sample; a `UserError` names a value that the journal cannot store."""
        fields = dict(vars(sample))
        fields["journal_id"] = None
        fields["status"] = sample.status.value
        for name in _COUNTERS:
            if isinstance(held := fields.get(name), SpecInfo | PrefixCacheInfo):
                fields[name] = vars(held)
        parts: list[bytes] = []
        for name in SAMPLE_COLUMNS:
            value = fields.get(name)
            column = value if type(value) is PackedArray else packed(value, narrow=name == "loss_mask")
            if column is None:  # absent, or not a column of numbers
                continue
            if column.digest is None:
                column.digest = f"{column.array.dtype.str:4}".encode() + _digest(column.array)
            fields[name] = None
            parts += name.encode(), column.digest
        for name in ("prompt", "response"):
            if type(text := fields.get(name)) is str:
                fields[name] = None
                parts += name.encode(), _TEXT.pack(len(text), hash(text))
        experts = fields.get("rollout_routed_experts")
        if type(experts) is np.ndarray and not experts.dtype.hasobject:
            fields["rollout_routed_experts"] = [str(experts.dtype), list(experts.shape)]
            parts.append(_digest(experts))
        small = self._codec.unique_bytes(fields, f"sample {sample.index}")
        return ContentKey(xxhash.xxh3_128_digest(b"".join([small, *parts])))

    def columns(self, sample: Sample) -> tuple[object, ...]:
        """Return the values of `COLUMNS`; a `UserError` names a value that the journal cannot store."""
        rest: dict[str, object] = {}  # non-default fields, and extra attributes set by plugins
        for name, value in dict(vars(sample)).items():
            if name in _DEFAULTS:
                default = _DEFAULTS[name]
                if value is default or (type(value) is type(default) and bool(value == default)):
                    continue
            rest[name] = value
        rest.pop("journal_id", None)
        for name in _COUNTERS:
            if isinstance(held := rest.get(name), SpecInfo | PrefixCacheInfo):
                rest[name] = held.to_dict()
        status = status_of(sample)
        if status == GENERATED:
            rest["status"] = sample.status.value
        else:
            rest.pop("status", None)
        versions = "[]"
        if type(sample.weight_versions) is list and all(type(version) is str for version in sample.weight_versions):
            rest.pop("weight_versions", None)
            versions = json.dumps(sample.weight_versions)
        reward: float | None = None
        if type(sample.reward) is float and not math.isnan(sample.reward):
            reward = sample.reward
            rest.pop("reward", None)
        else:
            number = sample.reward
            if isinstance(number, dict):
                number = None if self._reward_key is None else number.get(self._reward_key)
            with suppress(TypeError, ValueError, OverflowError):
                reward = None if number is None else float(number)
        values = (
            _whole(rest, "index", sample.index, None),
            status,
            reward,
            _whole(rest, "response_length", sample.response_length, 0),
            versions,
            _text(rest, "prompt", sample.prompt),
            _text(rest, "response", sample.response),
        )
        return (*values, self._codec.pack(rest, f"sample {sample.index}"))

    def sample(self, row_id: int, columns: Iterable[Any]) -> Sample:
        """Decode the sample of a row; `columns` are in the order of `COLUMNS`."""
        index, status, reward, length, versions, prompt, response, payload = columns
        rest: JsonMapping = self._codec.unpack(payload)
        known = {
            "index": index,
            "reward": reward,
            "response_length": length,
            "prompt": prompt,
            "response": response,
            "status": status,
            "journal_id": row_id,
        }
        if "weight_versions" not in rest:
            known["weight_versions"] = json.loads(versions)
        sample = Sample.from_dict({**known, **rest})
        sample.compact()
        return sample

    def sample_or_failure(self, row_id: int, columns: Sequence[object], *, check: bool) -> Sample:
        """Decode the sample of a row; an unreadable row becomes a failed sample with the cause.

        With `check`, so does a sample that is invalid for training: older versions wrote such rows.
        """
        try:
            sample = self.sample(row_id, columns)
        except Exception as error:  # noqa: BLE001 - a damaged row may raise any exception
            return _failure(row_id, columns, Sample(), error)
        if check and sample.status is not Sample.Status.FAILED:
            try:
                check_sample(sample)
            except BadSample as error:
                return _failure(row_id, columns, sample, error)
        return sample


def is_unusable(sample: Sample) -> bool:
    """True if the sample stands for an unusable row."""
    return (sample.failure or "").startswith(UNUSABLE)


def _failure(row_id: int, columns: Sequence[object], found: Sample, error: Exception) -> Sample:
    """Build the failed sample of an unusable row: its prompt, to be sampled again, and the error."""
    index, _, _, _, _, prompt, _, _ = columns
    reset_invalid_fields(found)
    return Sample(
        index=index if isinstance(index, int) else None,
        group_index=found.group_index,
        rollout_id=found.rollout_id,
        prompt=prompt if found.prompt == "" and isinstance(prompt, str) else found.prompt,
        label=found.label,
        metadata=found.metadata,
        status=Sample.Status.FAILED,
        failure=f"{UNUSABLE}{type(error).__name__}: {error}",
        remove_sample=True,
        generate_function_path=found.generate_function_path,
        custom_rm_path=found.custom_rm_path,
        task=found.task,
        session_id=found.session_id if isinstance(found.session_id, str) else None,
        journal_id=row_id,
    )


def flatten_group(group: Group | Sample) -> list[GroupLeaf]:
    """Return the samples of a group with their places; a `TypeError` if it is not a group."""
    if isinstance(group, Sample):
        return [GroupLeaf(group, None)]
    if not isinstance(group, list):
        raise TypeError(f"a group is a list of Sample, or of lists of them, not a {type(group).__name__}")
    leaves = []
    for number, member in enumerate(group):
        if isinstance(member, Sample):
            leaves.append(GroupLeaf(member, number))
        else:
            leaves += [GroupLeaf(sample, number, place) for place, sample in enumerate(_samples(member))]
    return leaves


def rebuild_groups(leaves: Iterable[GroupLeaf]) -> list[Group]:
    """Invert `flatten_group`: rebuild groups from leaves in order, by the ids of their groups."""
    groups: dict[int, Any] = {}
    members: dict[tuple[int, int], list[Sample]] = {}
    for leaf in leaves:
        if leaf.member is None:
            groups[leaf.group_id] = leaf.sample
            continue
        group = groups.setdefault(leaf.group_id, [])
        if leaf.leaf is None:
            group.append(leaf.sample)
            continue
        place = leaf.group_id, leaf.member
        if place not in members:
            members[place] = []
            group.append(members[place])
        members[place].append(leaf.sample)
    return list(groups.values())


def status_of(sample: Sample) -> str:
    """Return the value of the column `status` for a sample."""
    is_complete = sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    return GENERATED if is_complete and sample.reward is None else sample.status.value


def state_of(progress: Iterable[tuple[str, int]]) -> str:
    """Return the state of a group outside of batches, from status and response length of its samples."""
    all_ended, any_ended, started = True, False, False
    for status, length in progress:
        has_ended = status in _ENDED
        all_ended &= has_ended
        any_ended |= has_ended
        started |= length > 0 or status == GENERATED
    if all_ended and any_ended:
        return "finished"
    return "partial" if any_ended or started else "pending"


def _samples(member: object) -> Iterator[Sample]:
    if isinstance(member, Sample):
        yield member
    elif isinstance(member, list):
        for part in member:
            yield from _samples(part)
    else:
        raise TypeError(f"a member of a group is a Sample or a list of them, not a {type(member).__name__}")


def _whole(rest: dict[str, object], name: str, value: object, default: int | None) -> int | None:
    """Return the value of an integer column; other values stay in the payload."""
    if value is None or (type(value) is int and -_INT64 <= value < _INT64):
        if value is not None or default is None:
            rest.pop(name, None)
        return value
    return default


def _text(rest: dict[str, object], name: str, value: object) -> str:
    """Return the value of a text column; messages become JSON there and stay exact in the payload."""
    if type(value) is not str:
        return _readable(json.dumps(value, ensure_ascii=False, default=str))
    if _readable(value) == value:
        rest.pop(name, None)
        return value
    return _readable(value)


def _readable(text: str) -> str:
    """Make `text` valid UTF-8: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
