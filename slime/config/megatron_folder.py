"""Megatron's checkpoints, told by what lies in a folder: a run says what it was given instead of half reading it.

    <folder>/latest_checkpointed_iteration.txt   a number, or `release`
             iter_0000100/ or release/           .metadata and *.distcp (torch_dist), or mp_rank_* (torch)

Nothing in them is opened: their index is pickled.
"""

from __future__ import annotations

from pathlib import Path

from slime.errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
"""Names the newest checkpoint of a folder, in Megatron and here."""
_RELEASE = "release"
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


def megatron_checkpoint(folder: Path, step: int | None = None) -> str | None:
    """What kind of Megatron checkpoint a folder is or holds, in words; None for anything else."""
    latest = read_latest(folder)
    if latest is None:
        kind = _kind(folder)
        return None if kind is None else f"{kind}, {folder.name}"
    name = _RELEASE if latest == _RELEASE else f"iter_{int(latest):07d}" if latest.isdecimal() else latest
    if step is not None:
        name = f"iter_{step:07d}"
    kind = _kind(folder / name)
    if kind is None and latest != _RELEASE:  # which no other program writes
        return None
    return name if kind is None else f"{kind}, {name}"


def refuse_megatron(folder: str, flag: str, *, hf_checkpoint: str | None = None, step: int | None = None) -> None:
    """Raise a `UserError` for a Megatron checkpoint; `hf_checkpoint` is what it was probably converted from."""
    found = megatron_checkpoint(Path(folder), step) if Path(folder).is_dir() else None
    if found is None:
        return
    remedy = "convert it to a Hugging Face folder and give that"
    if hf_checkpoint is not None:
        remedy = (
            f"drop {flag} if it was converted from --hf-checkpoint {hf_checkpoint}, else give the Hugging Face folder "
            "of its weights"
        )
    raise UserError(
        f"{flag} {folder} is a Megatron checkpoint ({found}), which only the Megatron backend reads and this version "
        f"lacks: {remedy}"
    )


def _kind(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    return next((kind for kind, patterns in _KINDS.items() if any(any(folder.glob(one)) for one in patterns)), None)
