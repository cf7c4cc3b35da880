"""Writes checkpoints, in the foreground or during training (`--async-save`).

    begin     rank 0 makes a staging folder next to the final path
    parts     each rank writes its parts, synced
    complete  when all ranks are done, rank 0 adds meta.json and the random states, and renames the folder
    name      rank 0 writes the latest file of each model, the policy's last: the commit point of policy and critic
    remove    rank 0 deletes older checkpoints and leftovers of interrupted writes

Invariant: each step starts after the previous one is finished on all ranks; if the processes end at any time, the
latest file names a complete checkpoint, with the critic's of the same number. If one rank cannot write, all ranks raise
`NotWritten`, are in step, and leave no incomplete files.

Invariant of `--async-save`: the checkpoint has the weights from the start of the save, because they are copied to the
host. It becomes the latest only when the parts of all ranks are complete, by the same steps; until then the previous
one counts. One save runs at a time. The thread that writes has a process group of its own, so it does not interfere
with the collectives of training. It has no deadline: the calls that wait for it have one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from slime.config.model_folder import LATEST
from slime.data.source_state import state_path
from slime.models.saving import replace_folder
from slime.storage.files import FolderTaken, fsync_path, is_checkpoint
from slime.storage.json_types import JsonObject
from slime.train.checkpoints.errors import WritingRanks, run_together, write_together
from slime.train.checkpoints.rank_files import SavedPart, write_parts
from slime.train.checkpoints.staging import LEFT_BEHIND, staging_folder, staging_folders
from slime.train.topology import Ranks


@dataclass
class CheckpointDraft:
    """A checkpoint of one model to write: this rank's parts, and the metadata that rank 0 writes."""

    target: Path
    parts: Iterable[SavedPart]
    meta: JsonObject
    random_states: dict[str, torch.Tensor]
    writer: int
    """The process id of rank 0, which is part of the staging folder's name."""

    @property
    def staging(self) -> Path:
        return staging_folder(self.target, self.writer)

    @property
    def number(self) -> int:
        return int(self.target.name.removeprefix("iter_"))

    def __str__(self) -> str:
        return f"the checkpoint of rollout {self.number} to {self.target}"

    def copy_parts_to_host(self) -> None:
        """Replace the parts by copies on the host; each copy is dropped when it is written."""
        copies = deque(part.on_host() for part in self.parts)

        def drain() -> Iterator[SavedPart]:
            while copies:
                yield copies.popleft()

        self.parts = drain()

    def make_folder(self) -> None:
        """Make the staging folder; leftovers of earlier attempts are deleted."""
        if self.target.exists() and not is_checkpoint(self.target):
            raise FolderTaken(f"{self.target} is not a checkpoint of a run, or contains other files: move it away")
        for leftover in staging_folders(self.target):
            shutil.rmtree(leftover, ignore_errors=True)
        self.staging.mkdir(parents=True)

    def complete(self, files: dict[str, int]) -> None:
        """Add the metadata to the staging folder, which has all parts, and rename it to the final path."""
        save_file(self.random_states, self.staging / "rng.safetensors")
        (self.staging / "meta.json").write_text(json.dumps(self.meta | {"files": files}, indent=2))
        for name in ("rng.safetensors", "meta.json"):
            fsync_path(self.staging / name)
        fsync_path(self.staging)
        replace_folder(self.staging, self.target)


def begin(drafts: Sequence[CheckpointDraft], ranks: WritingRanks) -> None:
    """Make the staging folders, so that write errors show early; all ranks call it together."""
    for draft in drafts:
        run_together(ranks, draft.make_folder if ranks.rank == 0 else None, str(draft))


def commit(
    drafts: Sequence[CheckpointDraft],
    ranks: WritingRanks,
    *,
    keep_count: int | None,
    added: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the checkpoints, the policy's last, and name them as the latest; all ranks call it together."""
    try:
        files = []
        for draft in drafts:  # the names and sizes of the files of all ranks
            write = partial(write_parts, draft.staging, ranks.rank, added=added)
            own = write_together(ranks, iter(draft.parts), write, str(draft)) or {}
            files.append(dict(json.loads(pair) for pair in sorted(ranks.union(map(json.dumps, own.items())))))
        for draft, sizes in zip(drafts, files, strict=True):
            run_together(ranks, partial(draft.complete, sizes) if ranks.rank == 0 else None, str(draft))
    except BaseException:
        if ranks.rank == 0:
            for draft in drafts:
                shutil.rmtree(draft.staging, ignore_errors=True)
        raise

    def name_all() -> None:
        for draft in drafts:
            root = draft.target.parent
            unnamed = root / f".{LATEST}.tmp"
            unnamed.write_text(f"{draft.number}\n")
            fsync_path(unnamed)
            os.replace(unnamed, root / LATEST)
            fsync_path(root)

    last = drafts[-1].target
    run_together(ranks, name_all if ranks.rank == 0 else None, f"the name of the checkpoint {last}")
    if ranks.rank == 0:
        for draft in drafts:
            _remove_old(draft.target.parent, keep_count, keep=draft.target)
    return last


def _remove_old(root: Path, keep_count: int | None, *, keep: Path) -> None:
    """Delete all but the newest `keep_count` checkpoints, their data positions, and leftovers of interrupted writes.

    Only checkpoints of a run are deleted: a folder of such a name with other contents stays and does not count.
    """
    for leftover in root.iterdir():
        if LEFT_BEHIND.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    if keep_count is None:
        return
    found = sorted(p for p in root.iterdir() if re.fullmatch(r"iter_\d{7,}", p.name) and is_checkpoint(p))
    for old in found[: max(len(found) - keep_count, 0)]:
        if old != keep:
            shutil.rmtree(old, ignore_errors=True)
            state_path(root, int(old.name.removeprefix("iter_"))).unlink(missing_ok=True)


LOOK_AGAIN_S = 0.5
NO_DEADLINE = timedelta(days=30)


class BackgroundSave:
    """Saves checkpoints in a thread; all ranks create it together and call each method together."""

    def __init__(self, world: Ranks) -> None:
        self._world = world
        group = dist.new_group(backend="gloo", timeout=NO_DEADLINE) if world.size > 1 else None
        self._ranks = Ranks(world.rank, world.size, torch.device("cpu"), group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._added = 0

    def start(self, drafts: Sequence[CheckpointDraft], *, keep_count: int | None) -> None:
        """Copy the state and start to write it; raise `NotWritten` if the folder cannot be made."""
        assert self._saving is None, "the previous save is not finished"
        begin(drafts, self._world)
        for draft in drafts:
            draft.copy_parts_to_host()
        self._added = 0
        self._saving = self._thread.submit(commit, drafts, self._ranks, keep_count=keep_count, added=self._count)

    def finish(self, *, patient: bool, tick: Callable[[int], None] = lambda _: None) -> Path | None:
        """Return the checkpoint in progress, once, when it is complete; None if it is not complete or there is none.

        With `patient`, wait for it and call `tick` with the numbers of tensors written in the meantime. A `NotWritten`
        is raised on all ranks; the trainers keep the weights.
        """
        if self._saving is None:
            return None
        reported = self._added
        while patient and not self._saving.done():
            wait([self._saving], timeout=LOOK_AGAIN_S)
            if self._added > reported:
                tick(self._added - reported)
                reported = self._added
        busy = torch.tensor([0.0 if self._saving.done() else 1.0], device=self._world.device)
        if self._world.max(busy).item():
            return None
        saving, self._saving = self._saving, None
        return saving.result()

    def _count(self, _: str) -> None:
        self._added += 1
