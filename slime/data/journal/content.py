"""What a row of the journal was written from, remembered as a key: the same content is not written again.

Invariants: samples with equal keys have equal rows, down to any depth of what they hold. A key says that a row is in
the file only after the transaction that wrote it; whatever writes a row without a key takes the row's key away. Keys
are of this process alone.

A key is cheap where nothing changed: packed columns do not change, so each is hashed once; of a text Python itself
keeps the hash. All else is hashed anew each time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from slime.data.columns import Packed, packed
from slime.data.counters import PrefixCacheInfo, SpecInfo
from slime.data.journal.codec import Codec
from slime.data.sample import COLUMNS, Sample

_COLUMNS = tuple((name, name.encode()) for name in COLUMNS)
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
