"""Rollout: from prompts to finished, scored samples."""

from __future__ import annotations

from pathlib import Path

__path__.append(str(Path(__file__).parents[1] / "compat" / "rollout"))  # import paths of upstream
