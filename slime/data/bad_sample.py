"""Samples with numbers that are none, kept for inspection: `<run folder>/not_finite/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = "not_finite"


def keep_bad_sample(run_dir: str | None, rollout_id: int | None, index: int | None, facts: dict[str, Any]) -> Path:
    """Write what is known about a sample; the file."""
    where = "sample" if rollout_id is None else f"rollout_{rollout_id}-sample"
    path = Path(run_dir or ".") / FOLDER / f"{where}_{index}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1, default=str))
    return path
