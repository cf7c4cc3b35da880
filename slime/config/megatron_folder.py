"""Megatron's checkpoints, told by what lies in a folder: a run says what it was given instead of half reading it.

    <folder>/latest_checkpointed_iteration.txt   a number, or `release`
             iter_0000100/ or release/           .metadata and *.distcp (torch_dist), or mp_rank_* (torch)

Of torch_dist checkpoints weights are read (`slime.models.torch_dist`); here nothing is opened, their index is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
"""Names the newest checkpoint of a folder, in Megatron and here."""
_RELEASE = "release"
_INDEX = ".metadata"
_KINDS = {"torch_dist": ("*.distcp", "common.pt"), "torch": ("mp_rank_*",)}


def read_latest(folder: Path) -> str | None:
    """What a folder's file about the newest checkpoint says; None where there is no such file."""
    file = folder / LATEST
    if not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): choose another folder") from error


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One of Megatron's checkpoints; its kind is None where nothing but its name says so."""

    path: Path
    kind: str | None

    def __str__(self) -> str:
        return self.path.name if self.kind is None else f"{self.kind}, {self.path.name}"


def find_megatron(folder: Path, step: int | None = None) -> MegatronCheckpoint | None:
    """The Megatron checkpoint that a folder is, or the one it names as its newest (or `step`); None for others."""
    if not folder.is_dir():
        return None
    latest = read_latest(folder)
    if latest is None:
        kind = _kind(folder)
        return None if kind is None else MegatronCheckpoint(folder, kind)
    name = _RELEASE if latest == _RELEASE else f"iter_{int(latest):07d}" if latest.isdecimal() else latest
    if step is not None:
        name = f"iter_{step:07d}"
    kind = _kind(folder / name)
    if kind is None and latest != _RELEASE:  # which no other program writes
        return None
    return MegatronCheckpoint(folder / name, kind)


def megatron_to_read(folder: Path, what: str, step: int | None = None) -> Path | None:
    """The torch_dist checkpoint in a folder; None where there is none of Megatron's. `what` names the folder."""
    found = find_megatron(folder, step)
    if found is None:
        return None
    if found.kind == "torch":
        raise UserError(
            f"{what} is a Megatron checkpoint ({found}) of pickled objects, which are never opened here: have Megatron "
            "make a torch_dist one of it (--ckpt-convert-format torch_dist)"
        )
    if not (found.path / _INDEX).is_file():
        raise UserError(f"{what} is a Megatron checkpoint ({found}) without {_INDEX}: it is not whole, copy it again")
    return found.path


def refuse_megatron(folder: str, flag: str) -> None:
    """Raise a `UserError` for a Megatron checkpoint where a model folder is needed."""
    found = find_megatron(Path(folder))
    if found is not None:
        raise UserError(
            f"{flag} {folder} is a Megatron checkpoint ({found}), but a Hugging Face folder is needed: make one of it "
            "with slime convert, or give it with --load or --ref-load"
        )


def _kind(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    return next((kind for kind, patterns in _KINDS.items() if any(any(folder.glob(one)) for one in patterns)), None)
