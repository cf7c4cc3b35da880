"""What the entry points of this folder share: they take the flags of slime's documents and start `slime convert`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def convert(source: str, target: str, *flags: str | None) -> NoReturn:
    from slime.cli import main

    sys.exit(main(["convert", source, target, *(flag for flag in flags if flag is not None)]))


def note_ignored(words: Sequence[str]) -> None:
    """Shape flags of scripts/models come along; the model folder says the same."""
    flags = [word for word in words if word.startswith("--")]
    if flags:
        print(f"flags without effect here, config.json says the same: {', '.join(flags)}", file=sys.stderr)


def refuse(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)
