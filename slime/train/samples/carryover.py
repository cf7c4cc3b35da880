"""Rollouts that did not fill an optimizer step and wait for the next batch: `<folder>/rollout/carried_<id>.msgpack`.

Invariant: a carried rollout is trained on exactly once, with the reward it was given among its own group. Waiting rows
go in front of the next batch. They are saved beside the data position of the rollout that left them; a file is either
absent (nothing waits) or complete, since it is written beside its final name, flushed, and renamed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from slime.data.source_state import write_durably
from slime.errors import UserError
from slime.train.samples.batch import TrainBatch

FORMAT = 1
KNOWN = {field.name for field in dataclasses.fields(TrainBatch)}
REQUIRED = KNOWN - {"version_spans", "rollout_routed_experts", "mask_totals"}  # earlier versions did not write them
_ARRAY = 1
_NAME = re.compile(r"carried_(\d+)\.msgpack")
_CHECKPOINT = re.compile(r"iter_(\d{7,})")


def carried_path(folder: str | Path, rollout_id: int) -> Path:
    """The file of what waits after one rollout."""
    return Path(folder) / "rollout" / f"carried_{rollout_id}.msgpack"


def in_front_of(carried: TrainBatch | None, fresh: TrainBatch) -> TrainBatch:
    """The rows of both, carried ones first; carried rollouts whose ids clash with fresh ones get new ids."""
    if carried is None:
        return fresh
    rollout_ids = _apart_from(fresh.rollout_ids, carried.rollout_ids)
    return dataclasses.replace(carried, rollout_ids=rollout_ids).followed_by(fresh)


def save_carried(folder: str | Path, rollout_id: int, carried: TrainBatch | None) -> None:
    """Write what waits after `rollout_id`, all or nothing and durably; nothing waiting leaves no file."""
    path = carried_path(folder, rollout_id)
    if carried is None:
        path.unlink(missing_ok=True)
        return
    content = msgpack.packb(
        {"format": FORMAT, "batch": carried.to_dict()}, default=_encode, unicode_errors="surrogatepass"
    )
    write_durably(path, content)


def load_carried(folder: str | Path, rollout_id: int) -> TrainBatch | None:
    """What waited after `rollout_id`, or None; a `UserError` when the file is damaged or of another version."""
    path = carried_path(folder, rollout_id)
    if not path.is_file():
        return None
    remedy = "resume from another checkpoint, or delete the file to go on without the rollouts in it"
    try:
        content = path.read_bytes()
        saved = msgpack.unpackb(
            content, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(content)
        )
    except (OSError, ValueError, TypeError, msgpack.UnpackException) as cause:
        raise UserError(f"{path}: the rollouts that wait for training are unreadable ({cause}): {remedy}") from cause
    batch = saved.get("batch") if isinstance(saved, dict) and saved.get("format") == FORMAT else None
    if not isinstance(batch, dict) or not REQUIRED <= batch.keys() <= KNOWN:
        raise UserError(f"{path}: was written by another version of slime: {remedy}")
    return TrainBatch.from_dict(batch)


def remove_stale(folder: str | Path) -> None:
    """Delete the files of rollouts whose checkpoint is gone."""
    checkpoints = {int(match[1]) for _, match in _matching(Path(folder), _CHECKPOINT)}
    for path, match in list(_matching(Path(folder) / "rollout", _NAME)):
        if int(match[1]) not in checkpoints:
            path.unlink(missing_ok=True)


def _matching(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in folder.glob("*"):
        if (match := name.fullmatch(path.name)) is not None:
            yield path, match


def _apart_from(taken: Sequence[int], ids: Sequence[int]) -> list[int]:
    """`ids`, with fresh ones for those that are taken; equal ones stay equal."""
    unused = max([*taken, *ids], default=-1) + 1
    used = set(taken)
    renamed: dict[int, int] = {}
    for value in ids:
        if value in used and value not in renamed:
            renamed[value] = unused + len(renamed)
    return [renamed.get(value, value) for value in ids]


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"a {type(value).__name__} in the train metadata cannot be saved")
    return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))


def _decode(code: int, data: bytes) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    dtype, shape, content = msgpack.unpackb(data, max_bin_len=len(data))
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
