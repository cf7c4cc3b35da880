"""The sampling kernels in Triton's interpreter against the CPU sampler in float64."""

from __future__ import annotations

import json

import pytest

from tests.triton_interpreter import run_interpreted

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
    results: dict[str, list[str]] = {}
    for line in run_interpreted("from tests.engine import draw_checks; draw_checks.main()").splitlines():
        if line.startswith("{"):
            results |= json.loads(line)
    assert list(results) == CHECKS
    return results


@pytest.mark.parametrize("check", CHECKS)
def test_sampling_kernels_follow_the_sampler_rules(found: dict[str, list[str]], check: str) -> None:
    assert found[check] == []
