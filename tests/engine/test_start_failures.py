"""Starts of an engine that do not come to an end: what is said, and how the process leaves."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.cluster.memory.cuda_driver import CudaRefused
from slime.engine.embedded.loaded_engine import LoadedEngine
from slime.engine.embedded.options import parse_options
from slime.errors import UserError

LEAVES = """\
import threading
from slime.engine.embedded.__main__ import end_process

threading.Thread(target=threading.Event().wait, name="compile").start()
end_process(3)
"""


def test_a_process_whose_threads_still_compile_leaves_with_its_code() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVES], timeout=240).returncode == 3


@pytest.mark.parametrize("refusal", [CudaRefused("cuMemCreate: out of memory"), torch.cuda.OutOfMemoryError("no")])
def test_a_cache_that_does_not_fit_is_said_in_a_sentence(refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise refusal

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**34))
    engine = LoadedEngine(parse_options(["--model-path", "/nowhere"]))
    engine.memory, engine.capacity = None, 2**20
    engine.runner = SimpleNamespace(allocate_kv=refuse, kv_bytes_per_token=lambda: 4096)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"of 1048576 tokens takes 4\.0 GiB, and 1\.0 are free .* --max-total-tokens"):
        engine._allocate_cache()
