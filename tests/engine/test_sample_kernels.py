"""The sampling kernels in Triton's interpreter against the CPU sampler in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

CHECKS = [
    "plain_rows",
    "small_cuts",
    "large_cuts",
    "hard_cuts",
    "full_brackets",
    "random_cuts",
    "nan_rows",
    "distribution",
    "edits_ahead",
    "top_tokens",
    "prepared",
    "while_compiling",
    "whole_engine",
]


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Failures of each check of `draw_checks`; one process runs all checks because its imports take longest."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.draw_checks"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            results |= json.loads(line)
    assert list(results) == CHECKS
    return results


@pytest.mark.parametrize("check", CHECKS)
def test_sampling_kernels_follow_the_sampler_rules(found: dict[str, list[str]], check: str) -> None:
    assert found[check] == []
