"""A sample as one row of the journal, and back.

Invariant: a sample read back equals the one written. Columns are what a person looks for with SQL; what a column cannot
hold exactly (and every field without a column) stands in the payload, which goes before the column. Fields that have
their default value are left out.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from slime.data.buffer.codec import Codec
from slime.data.columns import Packed, packed
from slime.data.counters import PrefixCacheInfo, SpecInfo
from slime.data.sample import COLUMNS as SAMPLE_COLUMNS
from slime.data.sample import Sample
from slime.data.source import Group
from slime.data.validation import BadSample, check_sample, mend

# What a row of the journal was written from, remembered as a key: the same content is not written again.
#
# Invariants: samples with equal keys have equal rows, down to any depth of what they hold. A key says that a row is in
# the file only after the transaction that wrote it; whatever writes a row without a key takes the row's key away. Keys
# are of this process alone.
#
# A key is cheap where nothing changed: packed columns do not change, so each is hashed once; of a text Python itself
# keeps the hash. All else is hashed anew each time.

_COLUMNS = tuple((name, name.encode()) for name in SAMPLE_COLUMNS)
_TEXTS = (("prompt", b"prompt"), ("response", b"response"))
_TEXT = struct.Struct("<qq")
_COUNTERS: tuple[tuple[str, Any], ...] = (("spec_info", SpecInfo), ("prefix_cache_info", PrefixCacheInfo))
_DEFAULTS = vars(Sample())


@dataclass(slots=True)
class Content:
    """What was written, or is about to be, into a row."""

    key: bytes
    is_in_file: bool = False


def content_of(sample: Sample, codec: Codec) -> Content:
    """The content of a sample as it is now; a `UserError` names a value that the journal cannot keep."""
    fields = dict(vars(sample))
    fields["journal_id"] = None
    fields["status"] = sample.status.value
    for name, counters in _COUNTERS:
        if isinstance(held := fields.get(name), counters):
            fields[name] = vars(held)
    parts: list[bytes] = []
    for name, in_bytes in _COLUMNS:
        if (value := fields.get(name)) is not None and (digest := _column_digest(name, value)) is not None:
            fields[name] = None
            parts += in_bytes, digest
    for name, in_bytes in _TEXTS:
        if type(text := fields.get(name)) is str:
            fields[name] = None
            parts += in_bytes, _TEXT.pack(len(text), hash(text))
    experts = fields.get("rollout_routed_experts")
    if type(experts) is np.ndarray and not experts.dtype.hasobject:
        fields["rollout_routed_experts"] = [str(experts.dtype), list(experts.shape)]
        parts.append(_digest(experts))
    small = codec.told_apart(fields, f"sample {sample.index}")
    return Content(xxhash.xxh3_128_digest(b"".join([small, *parts])))


def kept_fields(sample: Sample) -> dict[str, Any]:
    """All that a row is made of: fields that have not their default value, and what else a plugin has set."""
    fields = {name: value for name, value in dict(vars(sample)).items() if not _is_default(name, value)}
    fields.pop("journal_id", None)
    for name, counters in _COUNTERS:
        if isinstance(held := fields.get(name), counters):
            fields[name] = held.to_dict()
    return fields


def _is_default(name: str, value: Any) -> bool:
    if name not in _DEFAULTS:
        return False
    default = _DEFAULTS[name]
    return value is default or (type(value) is type(default) and bool(value == default))


def _column_digest(name: str, value: Any) -> bytes | None:
    """Of a column's numbers, whether they are packed or in a list; None when it is no column of numbers."""
    column = value if type(value) is Packed else packed(value, narrow=name == "loss_mask")
    if column is None:
        return None
    if column.digest is None:
        column.digest = f"{column.array.dtype.str:4}".encode() + _digest(column.array)
    return column.digest


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
"""Of the table `samples`, after id, group_id, member and leaf."""

GENERATED = "generated"
"""In the column `status`: the response is complete, and its reward is not there yet."""
_ENDED = frozenset(status.value for status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED))

UNUSABLE = "journal: "
"""How the failure of a sample begins whose row could not be used."""

_INT64 = 2**63


@dataclass
class Leaf:
    """One sample of a group: its place there and, once encoded, its columns."""

    sample: Sample
    member: int | None
    """Which member of the group; None when the sample stands in a batch by itself."""
    leaf: int | None = None
    """Which of the samples that one dispatched sample fanned out into; None when it did not."""
    columns: tuple[Any, ...] = ()
    content: Content | None = None
    """What the columns are made of, where somebody may ask whether that has changed since."""


class RowCodec:
    """Samples to columns and back; `reward_key` says which number of a reward of several is the column."""

    def __init__(self, reward_key: str | None = None) -> None:
        self._codec = Codec()
        self._reward_key = reward_key

    def encoded(self, leaves: list[Leaf]) -> list[Leaf]:
        """The same leaves, with their columns."""
        for leaf in leaves:
            leaf.columns = self.columns(leaf.sample)
        return leaves

    def content(self, sample: Sample) -> Content:
        """What tells the row of a sample from its other rows; a `UserError` names a value that cannot be kept."""
        return content_of(sample, self._codec)

    def columns(self, sample: Sample) -> tuple[Any, ...]:
        """The values of `COLUMNS`; a `UserError` names a value that cannot be kept."""
        rest = kept_fields(sample)
        status = status_of(sample)
        if status == GENERATED:
            rest["status"] = sample.status.value
        else:
            rest.pop("status", None)
        values = (
            _whole(rest, "index", sample.index, None),
            status,
            self._reward(rest, sample.reward),
            _whole(rest, "response_length", sample.response_length, 0),
            _versions(rest, sample.weight_versions),
            _text(rest, "prompt", sample.prompt),
            _text(rest, "response", sample.response),
        )
        return (*values, self._codec.pack(rest, f"sample {sample.index}"))

    def sample(self, row_id: int, columns: Iterable[Any]) -> Sample:
        """The sample of a row; `columns` in the order of `COLUMNS`."""
        index, status, reward, length, versions, prompt, response, payload = columns
        rest: Mapping[str, Any] = self._codec.unpack(payload)
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

    def sample_or_failure(self, row_id: int, columns: Sequence[Any], *, check: bool) -> Sample:
        """The sample of a row, whatever is in it: one that cannot be read is a failure with its cause.

        So is one that could not be trained on, with `check`: a row that was written before such samples were refused.
        """
        try:
            sample = self.sample(row_id, columns)
        except Exception as error:  # noqa: BLE001 - whatever a damaged row raises is this sample's failure
            return _failure(row_id, columns, Sample(), error)
        if check and sample.status is not Sample.Status.FAILED:
            try:
                check_sample(sample)
            except BadSample as error:
                return _failure(row_id, columns, sample, error)
        return sample

    def _reward(self, rest: dict[str, Any], reward: Any) -> float | None:
        if type(reward) is float and not math.isnan(reward):
            rest.pop("reward", None)
            return reward
        value = reward.get(self._reward_key) if isinstance(reward, dict) else reward
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            return None


def _failure(row_id: int, columns: Sequence[Any], found: Sample, error: Exception) -> Sample:
    """What is left of a row that cannot be used: its prompt, to be sampled anew, and why."""
    index, _, _, _, _, prompt, _, _ = columns
    mend(found)
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


def flattened(group: Group | Sample) -> list[Leaf]:
    """The samples of a group with their places; a `TypeError` when it is none."""
    if isinstance(group, Sample):
        return [Leaf(group, None)]
    if not isinstance(group, list):
        raise TypeError(f"a group is a list of Sample, or of lists of them, not a {type(group).__name__}")
    leaves = []
    for number, member in enumerate(group):
        if isinstance(member, Sample):
            leaves.append(Leaf(member, number))
        else:
            leaves += [Leaf(sample, number, place) for place, sample in enumerate(_samples(member))]
    return leaves


def regrouped(leaves: Iterable[tuple[int, Leaf]]) -> list[Group]:
    """The inverse of `flattened`, for leaves in order, each with the id of its group."""
    groups: dict[int, Any] = {}
    members: dict[tuple[int, int], list[Sample]] = {}
    for group_id, leaf in leaves:
        if leaf.member is None:
            groups[group_id] = leaf.sample
            continue
        group = groups.setdefault(group_id, [])
        if leaf.leaf is None:
            group.append(leaf.sample)
            continue
        place = group_id, leaf.member
        if place not in members:
            members[place] = []
            group.append(members[place])
        members[place].append(leaf.sample)
    return list(groups.values())


def status_of(sample: Sample) -> str:
    """What the column `status` says of a sample."""
    is_complete = sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    return GENERATED if is_complete and sample.reward is None else sample.status.value


def state_of(progress: Iterable[tuple[str, int]]) -> str:
    """The state of a group that no batch has, from status and response length of its samples."""
    all_ended, any_ended, started = True, False, False
    for status, length in progress:
        has_ended = status in _ENDED
        all_ended &= has_ended
        any_ended |= has_ended
        started |= length > 0 or status == GENERATED
    if all_ended and any_ended:
        return "finished"
    return "partial" if any_ended or started else "pending"


def _samples(member: Any) -> Iterator[Sample]:
    if isinstance(member, Sample):
        yield member
    elif isinstance(member, list):
        for part in member:
            yield from _samples(part)
    else:
        raise TypeError(f"a member of a group is a Sample or a list of them, not a {type(member).__name__}")


def _whole(rest: dict[str, Any], name: str, value: Any, default: int | None) -> int | None:
    """A column of whole numbers; what is no such number stays in the payload."""
    if value is None or (type(value) is int and -_INT64 <= value < _INT64):
        if value is not None or default is None:
            rest.pop(name, None)
        return value
    return default


def _versions(rest: dict[str, Any], value: Any) -> str:
    if type(value) is list and all(type(version) is str for version in value):
        rest.pop("weight_versions", None)
        return json.dumps(value)
    return "[]"


def _text(rest: dict[str, Any], name: str, value: Any) -> str:
    """A column of text; messages are shown as JSON there, and kept exactly in the payload."""
    if type(value) is not str:
        return _readable(json.dumps(value, ensure_ascii=False, default=str))
    if _readable(value) == value:
        rest.pop(name, None)
        return value
    return _readable(value)


def _readable(text: str) -> str:
    """`text` as valid UTF-8: half characters become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
