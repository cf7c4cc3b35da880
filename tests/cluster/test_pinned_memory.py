"""Pinned memory is unregistered before it is freed (on a GPU: benchmarks/gpu_check.py weights)."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from slime.cluster.memory.regions import pinned_bytes


class Locks:
    """Fake of the driver's table of pinned addresses, which rejects duplicates."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def register(self, address: int, size: int, flags: int) -> int:
        if address in self.held:
            return 712
        self.held.add(address)
        return 0

    def unregister(self, address: int) -> int:
        self.held.remove(address)
        return 0


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    locks = Locks()
    runtime = SimpleNamespace(cudaHostRegister=locks.register, cudaHostUnregister=locks.unregister)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return locks


def test_memory_stays_pinned_while_a_view_exists(locks: Locks) -> None:
    data = pinned_bytes(1 << 20)
    part = data[100:200]
    del data
    gc.collect()
    assert len(locks.held) == 1
    part.fill_(3)
    del part
    gc.collect()
    assert not locks.held


def test_failed_pinning_returns_pageable_memory(
    locks: Locks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.cudart().cudaHostRegister = lambda address, size, flags: 712
    monkeypatch.setattr("slime.cluster.memory.regions._take_report", lambda: None)
    data = pinned_bytes(4096)
    data.fill_(7)
    assert int(data.sum()) == 7 * 4096
    assert "cannot pin" in caplog.text
