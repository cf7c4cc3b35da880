"""Runs a function in several processes of a gloo group, each started (warm) as `python -m tests.peers`."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.train.topology import Ranks

ROOT = Path(__file__).parents[1]
DEADLINE = timedelta(seconds=480)


def together(count: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """Calls a module-level `function(ranks, *arguments)` in `count` processes and returns their results.

    `folder` is the temporary folder of the test.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    (own / "arguments").write_bytes(pickle.dumps(arguments))
    words = [sys.executable, "-m", "tests.peers", str(own), function.__module__, function.__name__, str(count)]
    processes = [
        subprocess.Popen([*words, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE.total_seconds())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in processes), "\n".join(said)
    return [pickle.loads((own / f"answer-{rank}").read_bytes()) for rank in range(count)]


def main(folder: str, module: str, function: str, count: str, rank: str) -> None:
    torch.set_num_threads(1)
    own, world_size = Path(folder), int(count)
    store = dist.FileStore(str(own / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=world_size, timeout=DEADLINE)
    assert dist.group.WORLD is not None
    arguments = pickle.loads((own / "arguments").read_bytes())
    answer = getattr(importlib.import_module(module), function)(
        Ranks.of(dist.group.WORLD, torch.device("cpu")), *arguments
    )
    (own / f"answer-{rank}").write_bytes(pickle.dumps(answer))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of a live process group sometimes abort a normal exit


if __name__ == "__main__":
    main(*sys.argv[1:])
