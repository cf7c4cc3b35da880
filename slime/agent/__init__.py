"""Agents: sessions that hold the tokens, endpoints in front of them, sandboxes, harnesses and tools."""

from __future__ import annotations

from pathlib import Path

__path__.append(str(Path(__file__).parents[1] / "compat" / "agent"))  # import paths of upstream
