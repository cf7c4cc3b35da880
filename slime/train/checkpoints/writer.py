"""A checkpoint on its way to the disk.

    begin     the folder beside its final name is made, by rank 0
    parts     each rank writes its own, synced
    whole     when all have: rank 0 adds meta.json and the random states, and renames the folder
    named     the latest file of each model, the policy's last: the one commit point of a policy and its critic
    removed   older checkpoints, and what broken writes left

Invariant: each step comes after the one before it on all ranks; whatever ends the processes in between, the latest file
names a whole checkpoint, with the critic's of the same number. When one rank cannot write, all raise `NotWritten`, are
in step, and nothing half-written is left.
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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from slime.config.model_folder import LATEST
from slime.data.source_state import state_path
from slime.models.saving import replace_folder
from slime.storage.files import FolderTaken, fsync_path, is_checkpoint
from slime.train.checkpoints.errors import agreed
from slime.train.checkpoints.rank_files import Part, write_parts
from slime.train.checkpoints.staging import LEFT_BEHIND, staging_folder, staging_folders
from slime.train.topology import Ranks


class Peers(Protocol):
    """The ranks that write a checkpoint together."""

    @property
    def rank(self) -> int: ...

    def union(self, names: Iterable[str]) -> set[str]: ...


@dataclass
class Draft:
    """One model's checkpoint: this rank's parts, and what rank 0 says of the whole."""

    target: Path
    parts: Iterable[Part]
    meta: dict[str, Any]
    random_states: dict[str, torch.Tensor]
    writer: int
    """The process id of rank 0, by which all find the folder."""

    @property
    def staging(self) -> Path:
        return staging_folder(self.target, self.writer)

    @property
    def number(self) -> int:
        return int(self.target.name.removeprefix("iter_"))

    def __str__(self) -> str:
        return f"the checkpoint of rollout {self.number} to {self.target}"

    def take_copies(self) -> None:
        """From now on the parts are copies on the host; each is dropped when it is written."""
        self.parts = _emptying(deque(part.on_host() for part in self.parts))

    def make_folder(self) -> None:
        if self.target.exists() and not is_checkpoint(self.target):
            raise FolderTaken(f"{self.target} is no checkpoint of a run, or has more in it: move it away")
        for leftover in staging_folders(self.target):
            shutil.rmtree(leftover, ignore_errors=True)
        self.staging.mkdir(parents=True)

    def complete(self, files: dict[str, int]) -> None:
        """Put the folder, in which all parts are, to its place."""
        save_file(self.random_states, self.staging / "rng.safetensors")
        (self.staging / "meta.json").write_text(json.dumps(self.meta | {"files": files}, indent=2))
        for name in ("rng.safetensors", "meta.json"):
            fsync_path(self.staging / name)
        fsync_path(self.staging)
        replace_folder(self.staging, self.target)


def _emptying(parts: deque[Part]) -> Iterator[Part]:
    while parts:
        yield parts.popleft()


def begin(drafts: Sequence[Draft], ranks: Peers) -> None:
    """Make the folders, so that what cannot be written at all is known at once; all ranks together."""
    for draft in drafts:
        agreed(ranks, draft.make_folder if ranks.rank == 0 else None, str(draft))


def commit(
    drafts: Sequence[Draft], ranks: Peers, *, keep_count: int | None, added: Callable[[str], None] = lambda _: None
) -> Path:
    """Write checkpoints that were begun, the policy's last, and name them as the latest; all ranks together."""
    try:
        files = [_written(draft, ranks, added) for draft in drafts]
        for draft, sizes in zip(drafts, files, strict=True):
            agreed(ranks, partial(draft.complete, sizes) if ranks.rank == 0 else None, str(draft))
    except BaseException:
        if ranks.rank == 0:
            for draft in drafts:
                shutil.rmtree(draft.staging, ignore_errors=True)
        raise

    def name_all() -> None:
        for draft in drafts:
            _write_latest(draft.target.parent, draft.number)

    last = drafts[-1].target
    agreed(ranks, name_all if ranks.rank == 0 else None, f"the name of the checkpoint {last}")
    if ranks.rank == 0:
        for draft in drafts:
            _remove_old(draft.target.parent, keep_count, keep=draft.target)
    return last


def _written(draft: Draft, ranks: Peers, added: Callable[[str], None]) -> dict[str, int]:
    """Write this rank's parts; the files of all ranks and their sizes."""

    def write() -> dict[str, int]:
        try:
            return write_parts(draft.staging, ranks.rank, draft.parts, added=added)
        finally:
            for _ in draft.parts:  # what is left of them: other ranks may be waiting for this one's share
                pass

    own = agreed(ranks, write, str(draft))
    return dict(json.loads(pair) for pair in sorted(ranks.union(map(json.dumps, (own or {}).items()))))


def _write_latest(root: Path, rollout_id: int) -> None:
    unnamed = root / f".{LATEST}.tmp"
    unnamed.write_text(f"{rollout_id}\n")
    fsync_path(unnamed)
    os.replace(unnamed, root / LATEST)
    fsync_path(root)


def _remove_old(root: Path, keep_count: int | None, *, keep: Path) -> None:
    """Delete all but the newest `keep_count` checkpoints and their data positions, and leftovers of broken writes.

    Only what a run wrote: a folder of that name that is no checkpoint, or has more in it, stays and does not count.
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


# A checkpoint that is written while training goes on (`--async-save`).
#
# Invariant: what is written is what the weights were when the save began: a copy on the host. It is named as the
# latest only when the parts of all ranks are whole, by the same steps as any other; until then the one before it
# counts. One save at a time. The thread that writes has a process group of its own, so it never meets the collectives
# of training, and no deadline: whoever waits for it has one.

LOOK_AGAIN_S = 0.5
NO_DEADLINE = timedelta(days=30)


class BackgroundSave:
    """Made on all ranks together, once; all of them call each method together."""

    def __init__(self, world: Ranks) -> None:
        self._world = world
        group = dist.new_group(backend="gloo", timeout=NO_DEADLINE) if world.size > 1 else None
        self._ranks = Ranks(world.rank, world.size, torch.device("cpu"), group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._added = 0

    def start(self, drafts: Sequence[Draft], *, keep_count: int | None) -> None:
        """Copy what is to be saved, and return; a place that cannot be written at all is a `NotWritten` now."""
        assert self._saving is None, "the save before it was not finished"
        begin(drafts, self._world)
        for draft in drafts:
            draft.take_copies()
        self._added = 0
        self._saving = self._thread.submit(commit, drafts, self._ranks, keep_count=keep_count, added=self._count)

    def finish(self, *, patient: bool, tick: Callable[[int], None] = lambda _: None) -> Path | None:
        """The checkpoint that was begun, when it is whole, once; None while it is not, or there is none.

        With `patient` it is waited for, and `tick` hears of the tensors that were written meanwhile. A `NotWritten` is
        raised on all ranks; the weights are still there.
        """
        if self._saving is None:
            return None
        told = self._added
        while patient and not self._saving.done():
            wait([self._saving], timeout=LOOK_AGAIN_S)
            if self._added > told:
                tick(self._added - told)
                told = self._added
        busy = torch.tensor([0.0 if self._saving.done() else 1.0], device=self._world.device)
        if self._world.max(busy).item():
            return None
        saving, self._saving = self._saving, None
        return saving.result()

    def _count(self, _: str) -> None:
        self._added += 1
