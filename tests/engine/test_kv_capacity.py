"""Size of the KV cache from the free GPU memory, with a stub runner because the tests have no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.engine.embedded.memory import affordable_slots, step_bytes
from slime.engine.embedded.options import EngineOptions, parse_options
from slime.errors import UserError
from tests.tiny_models import SMALL

PER_TOKEN = 1000


def runner() -> Any:
    states = SimpleNamespace(total_bytes=lambda dtype: 0)
    return SimpleNamespace(cuda=True, states=states, dtype=torch.bfloat16, kv_bytes_per_token=lambda: PER_TOKEN)


def options(*more: str) -> EngineOptions:
    return parse_options(["--model-path", "m", *more])


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    amount = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (amount, 2 * amount))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return amount


def test_mem_fraction_sets_the_share_of_free_memory(free: int) -> None:
    assert affordable_slots(runner(), options("--mem-fraction", "0.3"), SMALL, 10**9) == int(free * 0.3) // PER_TOKEN


def test_memory_for_steps_is_reserved_at_a_high_mem_fraction(free: int) -> None:
    asked = options("--mem-fraction", "0.99")
    needed = step_bytes(torch.bfloat16, asked, SMALL)
    assert needed > 0.01 * free
    assert affordable_slots(runner(), asked, SMALL, 10**9) == (free - needed) // PER_TOKEN
    assert step_bytes(torch.bfloat16, options("--chunked-prefill-size", "16384"), SMALL) > needed
    assert step_bytes(torch.bfloat16, options("--max-running-requests", "512"), SMALL) > needed


def test_rejects_a_gpu_without_room_and_suggests_a_remedy(free: int) -> None:
    with pytest.raises(UserError, match=r"is left for the KV cache in addition to .* lower --chunked-prefill-size"):
        affordable_slots(runner(), options("--chunked-prefill-size", "4000000"), SMALL, 10**9)
