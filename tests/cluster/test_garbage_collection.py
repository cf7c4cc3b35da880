"""The garbage collector is paused while several threads compile."""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.cluster import garbage_collection
from slime.cluster.garbage_collection import gc_disabled_in_all_threads


class Garbage:
    """A reference cycle whose finalizer runs Python code, as some of torch's objects do."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        sum(range(200))


def parse_repeatedly(times: int) -> None:
    source = inspect.getsource(argparse)
    for _ in range(times):
        for _ in range(50):
            Garbage()
        ast.parse(source)


def test_threads_parse_concurrently_while_the_collector_is_paused() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    try:
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(gc_disabled_in_all_threads()(parse_repeatedly), 8) for _ in range(3)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    assert gc.isenabled()


def test_last_exit_restores_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "COLLECTS_WITHIN_CALLS", True)
    first, second = gc_disabled_in_all_threads(), gc_disabled_in_all_threads()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled_in_all_threads():
            pass
        assert not gc.isenabled()  # unchanged
    finally:
        gc.enable()


def test_collector_stays_enabled_on_newer_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "COLLECTS_WITHIN_CALLS", False)
    with gc_disabled_in_all_threads():
        assert gc.isenabled()
