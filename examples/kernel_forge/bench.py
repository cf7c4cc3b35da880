"""A kernel as a running program that is told inputs and gives back what it computed: nothing else of it is believed.

Invariant: what runs a model's code holds no expected result and judges nothing, and a process that the code can reach
into keeps no time. Inputs go in, outputs come out, over two pipes; who holds the other ends draws and judges them.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from problems import Floats, Inputs, Problem

from slime.agent.sandbox import SandboxLimits, make_sandbox
from slime.agent.sandbox.compiler import CCompiler, find_c_compiler, first_error
from slime.agent.sandbox.host_sandbox import MachineProcess, MachineSandbox
from slime.errors import UserError

HARNESS = Path(__file__).resolve().parent / "harness"
LOAD, RUN, GUARD = 1, 2, 16
"""As in harness/runner.c."""
FLAGS = ("-std=gnu11", "-O3", "-w")
LIMITS = SandboxLimits(
    seconds=20, memory_mb=512, processes=48, disk_mb=64, file_mb=32, open_files=64, cpu_seconds=60, output_kb=16
)
PATIENCE_S = 3.0
"""How long a kernel may take for one request; the naive ones take a hundredth of a second."""
_ENDINGS: dict[int, str] = {signal.SIGSYS: "did what a kernel may not do", signal.SIGXCPU: "took too long"}


class DoesNotCompile(Exception):
    """The compiler's first complaint."""


class Ended(Exception):
    """The program is gone, or does not answer: why, in a few words that the model reads."""


class Running:
    """A kernel that waits for requests."""

    extra = 0
    """Floats that come behind each y and its guard."""

    def __init__(self, process: MachineProcess) -> None:
        self._process = process
        self._length = 0

    async def load(self, problem: Problem, inputs: Inputs) -> None:
        """Give it its matrices."""
        w_length, self._length = problem.lengths(inputs.n, inputs.m)
        head = struct.pack("<5i", LOAD, inputs.n, inputs.m, w_length, self._length)
        await self._send(head + inputs.x.tobytes() + inputs.w.tobytes())

    async def run(self, numbers: Floats) -> Floats:
        """y with its guard, for each pair of numbers: one row each."""
        return (await self.timed(numbers))[0]

    async def timed(self, numbers: Floats) -> tuple[Floats, float]:
        """The same, and how many seconds passed from the request to the answer."""
        began = time.perf_counter()
        return await self._answer(numbers), time.perf_counter() - began

    async def _answer(self, numbers: Floats) -> Floats:
        await self._send(struct.pack("<5i", RUN, len(numbers), 0, 0, 0) + numbers.tobytes())
        width = self._length + GUARD + self.extra
        try:
            async with asyncio.timeout(PATIENCE_S):
                data = await self._process.stdout.readexactly(4 * len(numbers) * width)
        except TimeoutError:
            raise Ended("took too long") from None
        except asyncio.IncompleteReadError:
            raise await self._gone() from None
        return np.frombuffer(data, dtype=np.float32).reshape(len(numbers), width)

    async def _send(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._process.stdin.write(data)
                await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise await self._gone() from None
        except TimeoutError:
            raise Ended("took too long") from None

    async def _gone(self) -> Ended:
        try:
            async with asyncio.timeout(PATIENCE_S):
                code = await self._process.wait()
        except TimeoutError:
            return Ended("closed its output")
        if code >= 128:
            return Ended(_ENDINGS.get(code - 128, "crashed"))
        return Ended("ended early")


class Bench(Protocol):
    """Where kernels of one language run."""

    def about(self) -> dict[str, str]:
        """What verdicts depend on, besides the kernel."""
        ...

    def started(self, source: str) -> AbstractAsyncContextManager[Running]:
        """The kernel of a text, in a sandbox that ends with the block; raises DoesNotCompile."""
        ...

    async def aclose(self) -> None: ...


class CBench:
    """C kernels: some sandboxes compile and never run them, and every kernel runs in a sandbox of its own."""

    def __init__(self, sandbox: str = "auto", compiler: CCompiler | None = None) -> None:
        if sandbox not in ("auto", "local", "subprocess"):
            raise UserError(f"kernels run on this machine, not in a sandbox {sandbox!r}: use --sandbox auto")
        self._kind, self._compiler = sandbox, compiler or find_c_compiler()
        self._shops: list[MachineSandbox] = []
        self._free: list[MachineSandbox] = []
        self._launch = b""

    def about(self) -> dict[str, str]:
        files = [path.read_text() for path in sorted(HARNESS.glob("*.c"))]
        return {"compiler": self._compiler.version, "flags": " ".join(FLAGS), "harness": "\n".join(files)}

    @asynccontextmanager
    async def started(self, source: str) -> AsyncIterator[Running]:
        program = await self._built(source)
        async with self._sandbox() as sandbox:
            await sandbox.write_file("launch", self._launch)
            await sandbox.write_file("kernel", program)
            process = await sandbox.popen(["/bin/sh", "-c", "chmod +x launch kernel && exec ./launch ./kernel"])
            try:
                yield Running(process)
            finally:
                await process.kill()

    async def _built(self, source: str) -> bytes:
        """The program, as bytes: of a text that no other one is beside."""
        shop = self._free.pop() if self._free else await self._opened_shop()
        try:
            await shop.write_file("kernel.c", source)
            outcome = await self._compiler.build(shop, ["kernel.c", "runner.o"], "kernel", FLAGS)
            if outcome.code != 0:
                raise DoesNotCompile(first_error(outcome, limit=60))
            return await shop.read_bytes("kernel")
        finally:
            self._free.append(shop)

    async def _opened_shop(self) -> MachineSandbox:
        """Another sandbox to compile in: there are as many as kernels were ever compiled side by side."""
        shop = self._sandbox()
        await shop.__aenter__()
        self._shops.append(shop)
        for name in ("launch.c", "runner.c"):
            await shop.write_file(name, HARNESS / name)
        for words in (["launch.c", "-o", "launch"], ["-c", "runner.c", "-o", "runner.o"]):
            outcome = await shop.exec([self._compiler.path, *FLAGS, *words])
            if outcome.code != 0:
                raise UserError(
                    f"{self._compiler.path} cannot build the harness ({first_error(outcome)}): install the headers "
                    "of the C library and of Linux, such as by `apt install libc6-dev`"
                )
        self._launch = await shop.read_bytes("launch")
        return shop

    def _sandbox(self) -> MachineSandbox:
        sandbox = make_sandbox(self._kind, limits=LIMITS)
        assert isinstance(sandbox, MachineSandbox)
        return sandbox

    async def aclose(self) -> None:
        for shop in self._shops:
            await shop.__aexit__(None, None, None)
