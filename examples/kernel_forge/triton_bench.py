"""Triton kernels on a GPU: built ahead of time in one sandbox, launched in another by a program that is not theirs.

A text is Python, and compiling it runs it: that happens in a sandbox of its own without a GPU, of which only a cubin
and a few checked numbers come out. The sandbox that has the GPU's device nodes runs `harness/cuda_runner.py`, which
loads the cubin through libcuda; there the model's work is device code alone, so the GPU's clock can be believed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import HARNESS, LIMITS, DoesNotCompile, Running
from problems import EDGES, Floats

from slime.agent.sandbox import make_sandbox
from slime.agent.sandbox.host_sandbox import MachineProcess, MachineSandbox, nvidia_devices
from slime.agent.sandbox.protocol import Outcome, SandboxError
from slime.errors import UserError

HEAD = "import triton\nimport triton.language as tl\n"
BUILD = replace(LIMITS, seconds=60, memory_mb=4096, disk_mb=256, open_files=1024)
LAUNCH = replace(LIMITS, memory_mb=8192, processes=128, open_files=1024)
"""libcuda starts threads and maps much; how long a launch may take is bench.PATIENCE_S, as for kernels in C."""
MOST = {"shared": 227 << 10, "threads": 1024, "grid": 2**31 - 1, "grid_further": 65_535, "cubin": 16 << 20}
READY = b"ready\n"
"""As in harness/cuda_runner.py."""
_ABOUT_S = 60.0


@dataclass(frozen=True)
class Gpu:
    """The card that kernels run on."""

    name: str
    arch: int
    """Such as 90 for compute capability 9.0."""
    driver: int
    card: int = 0
    """Its number, as CUDA counts."""
    devices: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


def find_gpu(card: int = 0) -> Gpu:
    """The card of this number; UserError where there is none."""
    paths = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    words = [sys.executable, "-I", "-S", str(HARNESS / "cuda_runner.py"), "about", str(card)]
    said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ABOUT_S)
    if said.returncode != 0:
        why = (said.stderr.strip().splitlines() or ["no reason"])[-1]
        raise UserError(f"Triton kernels need an NVIDIA GPU, and there is none to use here ({why}): use --kernels c")
    environment = {**paths, "CUDA_VISIBLE_DEVICES": str(card), "CUDA_CACHE_DISABLE": "1"}
    return Gpu(**json.loads(said.stdout), card=card, devices=tuple(nvidia_devices()), environment=environment)


class CudaRunning(Running):
    """A kernel on the GPU: behind each y comes how long its launch took by the GPU's clock."""

    extra = 1

    async def timed(self, numbers: Floats) -> tuple[Floats, float]:
        """y with its guard for each pair of numbers, and the seconds of all launches."""
        answer = await self._answer(numbers)
        return answer[:, :-1], float(answer[:, -1].sum()) / 1e3


class TritonBench:
    """Triton kernels: each is built in a sandbox of its own and runs in another one, that sees the GPU."""

    def __init__(self, sandbox: str, gpu: Gpu, timed: Mapping[str, tuple[int, int, int]]) -> None:
        if sandbox not in ("auto", "local", "subprocess"):
            raise UserError(f"kernels run on this machine, not in a sandbox {sandbox!r}: use --sandbox auto")
        found = importlib.util.find_spec("triton")
        if found is None or not found.submodule_search_locations:
            raise UserError("Triton kernels need the package triton: install it, such as by `pip install triton`")
        self._kind, self._gpu, self._triton = sandbox, gpu, Path(found.submodule_search_locations[0]).resolve()
        self._sizes = [*EDGES, *sorted({(n, m) for n, m, _ in timed.values()})]

    def about(self) -> dict[str, str]:
        files = [path.read_text() for path in sorted(HARNESS.glob("*.py"))]
        gpu = f"{self._gpu.name} {self._gpu.arch} {self._gpu.driver}"
        return {"gpu": gpu, "triton": version("triton"), "harness": "\n".join(files)}

    @asynccontextmanager
    async def started(self, source: str) -> AsyncIterator[Running]:
        cubin, launch = await self._built(source)
        made = self._sandbox(
            limits=LAUNCH, devices=self._gpu.devices, env=self._gpu.environment, visible=_library_folders(self._gpu)
        )
        async with made as sandbox:
            await sandbox.write_file("kernel.cubin", cubin)
            await sandbox.write_file("kernel.json", json.dumps(launch))
            await sandbox.write_file("cuda_runner.py", HARNESS / "cuda_runner.py")
            process = await sandbox.popen([sandbox.python, "-I", "-S", "cuda_runner.py"])
            try:
                await _got_gpu(process)
                yield CudaRunning(process)
            finally:
                await process.kill()

    async def _built(self, source: str) -> tuple[bytes, dict[str, Any]]:
        """The program for the GPU and how it is launched, of a text that no other one is beside."""
        visible = [self._triton, *self._triton.parent.glob("triton-*.dist-info")]  # which says what it can compile for
        async with self._sandbox(limits=BUILD, visible=visible, env={"TRITON_BACKENDS_IN_TREE": "1"}) as shop:
            await shop.write_file("kernel.py", HEAD + source + "\n")
            await shop.write_file("build_triton.py", HARNESS / "build_triton.py")
            asked = {"site": str(self._triton.parent), "arch": self._gpu.arch, "sizes": self._sizes}
            outcome = await shop.exec([shop.python, "-I", "-S", "build_triton.py", json.dumps(asked)])
            if outcome.code != 0:
                raise DoesNotCompile(last_error(outcome, limit=60))
            size, launch = await shop.exec("wc -c < kernel.cubin"), await shop.exec("head -c 4096 kernel.json")
            if not size.out.strip().isdigit() or int(size.out) > MOST["cubin"]:
                raise DoesNotCompile("no program came of it")
            return await shop.read_bytes("kernel.cubin"), checked_launch(launch.out, self._sizes)

    def _sandbox(self, **options: Any) -> MachineSandbox:
        sandbox = make_sandbox(self._kind, **options)
        assert isinstance(sandbox, MachineSandbox)
        return sandbox

    async def aclose(self) -> None:
        """Nothing outlives a kernel."""


async def _got_gpu(process: MachineProcess) -> None:
    """Wait for the word that there is a GPU; SandboxError without, since no kernel is to blame for that."""
    try:
        async with asyncio.timeout(_ABOUT_S):
            line = await process.stdout.readline()
            said = "" if line == READY else (await process.stderr.read()).decode(errors="replace")
    except TimeoutError:
        raise SandboxError(f"the GPU was not there within {_ABOUT_S:g} s") from None
    if line != READY:
        raise SandboxError(f"the sandbox has no GPU: {(said.strip().splitlines() or ['no reason'])[-1]}")


def checked_launch(text: str, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """How to launch a kernel, from what a sandbox says that ran a model's code: numbers of the right kind and size."""
    try:
        said = json.loads(text)
        name, shared, threads, grids = str(said["name"]), said["shared"], said["threads"], said["grids"]
        numbers = [shared, threads, said["scratch"], *(number for grid in grids for number in grid)]
        shaped = len(grids) == len(sizes) and all(len(grid) == 3 for grid in grids)
    except (ValueError, KeyError, TypeError):
        raise DoesNotCompile("says nothing about its launch") from None
    if not shaped or not all(type(number) is int for number in numbers):
        raise DoesNotCompile("GRID is not one to three whole numbers")
    if said["scratch"] != 0:
        raise DoesNotCompile("needs scratch memory")
    if not (0 <= shared <= MOST["shared"] and 0 < threads <= MOST["threads"] and name.isidentifier()):
        raise DoesNotCompile("needs more than a GPU has")
    for first, *further in grids:
        if not (0 < first <= MOST["grid"] and all(0 < number <= MOST["grid_further"] for number in further)):
            raise DoesNotCompile("GRID is out of bounds")
    return {"name": name, "shared": shared, "threads": threads, "grids": list(zip(sizes, grids, strict=True))}


def last_error(outcome: Outcome, *, limit: int = 120) -> str:
    """What was wrong with a text, in the words of Python or Triton and in one line."""
    if outcome.cause is not None:
        return f"the compiler ran into the limit on {outcome.cause}"
    lines = [line.strip() for line in outcome.err.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit code {outcome.code}")[:limit]


def _library_folders(gpu: Gpu) -> list[str]:
    """Where libcuda may be besides /usr."""
    paths = (gpu.environment or {}).get("LD_LIBRARY_PATH", "").split(":")
    return [path for path in paths if os.path.isdir(path)]
