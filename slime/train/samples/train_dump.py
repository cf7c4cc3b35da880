"""Dumps the values that training computed as JSON lines: a header, then a row per sample in the order of indices.

Invariant: numbers are the ones that the losses used, for whole responses; a file is complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.errors import UserError
from slime.storage.files import is_dump, write_durably
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from slime.train.samples.rollout_data import RolloutData

FORMAT_VERSION = 2
COLUMNS = ("sample_indices", "group_indices", "rollout_ids", "rewards", "raw_reward", "truncated")


def dump_rows(data: RolloutData, *, rank: int) -> list[JsonObject]:
    """Return one plain dict per sample of a rank."""
    from slime.train.samples.rollout_data import PER_TOKEN  # imports torch, which the driver does not need

    rows = []
    for position in range(len(data["response_lengths"])):
        row: JsonObject = {"data_parallel_rank": rank}
        row |= {name: data[name][position] for name in COLUMNS}
        for name in ("tokens", "loss_masks", *PER_TOKEN):
            if name in data:
                row[name] = data[name][position].tolist()
        rows.append(row)
    return rows


def write_train_dump(template: str, rollout_id: int, ranks: Sequence[Sequence[JsonObject]]) -> Path:
    """Write the rows of all ranks to the path that the template gives for `{rollout_id}`."""
    path = Path(template.format(rollout_id=rollout_id))
    if path.exists() and not is_dump(path):
        raise UserError(f"--save-debug-train-data: {path} exists and was not written by a run; choose another path")
    rows = sorted((row for rank in ranks for row in rank), key=lambda row: row["sample_indices"])
    header = {"format": "slime-train-dump", "format_version": FORMAT_VERSION, "rollout_id": rollout_id}
    write_durably(path, "".join(json.dumps(entry) + "\n" for entry in (header, *rows)).encode())
    return path
