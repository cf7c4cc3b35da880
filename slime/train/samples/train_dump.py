"""What training computed for each sample, as JSON lines: a header, then a row per sample in the order of their indices.

Invariant: numbers are those that the losses used, whole responses each; a file is complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.data.source_state import write_durably
from slime.errors import UserError
from slime.storage.files import is_dump

if TYPE_CHECKING:
    from slime.train.samples.rollout_data import RolloutData

FORMAT_VERSION = 2
COLUMNS = ("sample_indices", "group_indices", "rollout_ids", "rewards", "raw_reward", "truncated")


def dump_rows(data: RolloutData, *, rank: int) -> list[dict[str, Any]]:
    """One plain dict per sample of a rank."""
    from slime.train.samples.rollout_data import PER_TOKEN  # torch, which whoever only writes the dump does without

    rows = []
    for position in range(len(data["response_lengths"])):
        row: dict[str, Any] = {"data_parallel_rank": rank}
        row |= {name: data[name][position] for name in COLUMNS}
        for name in ("tokens", "loss_masks", *PER_TOKEN):
            if name in data:
                row[name] = data[name][position].tolist()
        rows.append(row)
    return rows


def write_train_dump(template: str, rollout_id: int, ranks: Sequence[Sequence[dict[str, Any]]]) -> Path:
    """Write the rows of all ranks; `{rollout_id}` in the template is filled in."""
    path = Path(template.format(rollout_id=rollout_id))
    if path.exists() and not is_dump(path):
        raise UserError(f"--save-debug-train-data would overwrite {path}, which no run wrote: choose another name")
    rows = sorted((row for rank in ranks for row in rank), key=lambda row: row["sample_indices"])
    header = {"format": "slime-train-dump", "format_version": FORMAT_VERSION, "rollout_id": rollout_id}
    write_durably(path, "".join(json.dumps(entry) + "\n" for entry in (header, *rows)).encode())
    return path
