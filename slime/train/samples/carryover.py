"""Carries rollouts that did not fill an optimizer step over to the next batch, and saves them in the meantime.

They are saved in `<folder>/rollout/carried_<id>.msgpack`, next to the data position of the rollout that left them.
Invariant: a carried rollout is trained on exactly once, with the reward it got in its own group. Carried rows go in
front of the next batch. A file is either absent (nothing is carried) or complete, because it is written under a
temporary name, flushed, and renamed.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgpack
import numpy as np

from slime.errors import UserError
from slime.storage.files import write_durably
from slime.train.samples.batch import TrainBatch

FORMAT = 1
KNOWN = {field.name for field in dataclasses.fields(TrainBatch)}
REQUIRED = KNOWN - {"version_spans", "rollout_routed_experts", "mask_totals"}  # earlier versions did not write them
_ARRAY = 1
_NAME = re.compile(r"carried_(\d+)\.msgpack")
_CHECKPOINT = re.compile(r"iter_(\d{7,})")


def carried_path(folder: str | Path, rollout_id: int) -> Path:
    """Return the file of the rollouts carried over after one rollout."""
    return Path(folder) / "rollout" / f"carried_{rollout_id}.msgpack"


def prepend_carried(carried: TrainBatch, fresh: TrainBatch) -> TrainBatch:
    """Put carried rows in front of fresh ones; carried rollouts whose ids clash with fresh ones get new ids."""
    taken = set(fresh.rollout_ids)
    unused = max([*fresh.rollout_ids, *carried.rollout_ids], default=-1) + 1
    renamed: dict[int, int] = {}
    for rollout_id in carried.rollout_ids:
        if rollout_id in taken and rollout_id not in renamed:
            renamed[rollout_id] = unused + len(renamed)
    rollout_ids = [renamed.get(rollout_id, rollout_id) for rollout_id in carried.rollout_ids]
    return dataclasses.replace(carried, rollout_ids=rollout_ids).followed_by(fresh)


def save_carried(folder: str | Path, rollout_id: int, carried: TrainBatch | None) -> None:
    """Write the rollouts carried over after `rollout_id`, atomically and durably; without any, delete the file."""
    path = carried_path(folder, rollout_id)
    if carried is None:
        path.unlink(missing_ok=True)
        return
    content = msgpack.packb(
        {"format": FORMAT, "batch": carried.to_dict()}, default=_encode, unicode_errors="surrogatepass"
    )
    write_durably(path, content)


def load_carried(folder: str | Path, rollout_id: int) -> TrainBatch | None:
    """Load the rollouts carried over after `rollout_id`, or None.

    Raises `UserError` if the file is damaged or of another version.
    """
    path = carried_path(folder, rollout_id)
    if not path.is_file():
        return None
    remedy = "resume from another checkpoint, or delete the file to continue without the rollouts in it"
    try:
        content = path.read_bytes()
        saved = msgpack.unpackb(
            content, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(content)
        )
    except (OSError, ValueError, TypeError, msgpack.UnpackException) as cause:
        raise UserError(f"{path}: the carried-over rollouts are unreadable ({cause}); {remedy}") from cause
    batch = saved.get("batch") if isinstance(saved, dict) and saved.get("format") == FORMAT else None
    if not isinstance(batch, dict) or not REQUIRED <= batch.keys() <= KNOWN:
        raise UserError(f"{path}: the file is of another version of slime; {remedy}")
    return TrainBatch(**batch)


def remove_stale(folder: str | Path) -> None:
    """Delete the files of rollouts whose checkpoint no longer exists."""
    checkpoints = {int(match[1]) for path in Path(folder).glob("*") if (match := _CHECKPOINT.fullmatch(path.name))}
    for path in list((Path(folder) / "rollout").glob("*")):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) not in checkpoints:
            path.unlink(missing_ok=True)


def _encode(value: object) -> object:
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
