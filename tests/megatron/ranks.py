"""Process groups that run test functions on all ranks, reused between tests because importing Megatron takes seconds.

Functions are pickled by name, so they are defined at module level; they read their rank from torch.distributed. An
exception in any process is raised in the test and closes the group.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PATIENCE = timedelta(minutes=9)
PRELOADED = (
    "tests.megatron.trainings", "slime.train.backends.megatron.builder", "megatron.core.dist_checkpointing",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.auto.modeling_auto",
)  # fmt: skip
"""Slow imports of the test functions."""


class RankGroup:
    """A group of `size` processes; `run` calls a function in all of them and returns the results in rank order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        forks = _fork_context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = forks.Pipe()
            process = forks.Process(target=_serve, args=(there, rank, size, store), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args, keywords))
        answers = [self._answer(rank) for rank in range(self.size)]
        failures = [text for ok, text in answers if not ok]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(PATIENCE.total_seconds()):
            return False, f"rank {rank} gave no answer"
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
            return answer
        except EOFError:
            return False, f"rank {rank} ended"

    def close(self) -> None:
        self.broken = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()
        self._folder.cleanup()


def _fork_context() -> ForkServerContext:
    """Context that forks processes from a server with the imports done, one thread and no computation before."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.uname().sysname == "Linux" else "lo0"
    torch.set_num_threads(1)
    gc.freeze()  # scanning all imported objects would dominate the time of a short function
    for turn in itertools.count():
        try:
            function, args, keywords = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        meeting = dist.FileStore(f"{store}-{turn}", size)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=PATIENCE)
        try:
            answer = (True, function(*args, **keywords))
        except Exception:  # noqa: BLE001 (the test raises it)
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
            continue
        _free_modules()
        dist.destroy_process_group()
        pipe.send(answer)


def _free_modules() -> None:
    """Free the modules of a function, and with them its process groups: each has a thread that wakes every 10 ms.

    Experts and rotary embeddings keep tensors that refer to the whole model through their graph or a Megatron cache,
    invisible to the garbage collector, so the attributes of remaining modules are cleared.
    """
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module) and type(one).__module__.startswith(("megatron.", "slime.")):
            vars(one).clear()
    gc.collect()


@contextmanager
def model_parallel(**sizes: Any) -> Iterator[None]:
    """Create Megatron's groups with these sizes of `initialize_model_parallel`; destroy them on exit."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from slime.train.backends.megatron.cpu_runtime import prepare

    prepare()
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
