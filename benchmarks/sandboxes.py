"""Sandboxes of this machine: how long a start takes, a command, a hundred starts at once, and what a snapshot costs.

    python benchmarks/sandboxes.py [--count 100] [--at-once 16] [--files 1000]

The target is a hundred sandboxes in ten seconds. Every kind that this machine has is measured in the one run, and so
are the two ways a snapshot is taken; ratios are to `subprocess`, which builds no walls.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slime.agent.sandbox import Snapshot
from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.local import LocalSandbox, unavailable_reason
from slime.agent.sandbox.registry import SubprocessSandbox

Make = Callable[[], MachineSandbox]


async def one_by_one(make: Make, count: int) -> tuple[float, float, float]:
    """Medians, in ms: start, one `true`, end."""
    starts, commands, ends = [], [], []
    for _ in range(count):
        begun = time.perf_counter()
        sandbox = make()
        await sandbox.__aenter__()
        started = time.perf_counter()
        await sandbox.exec(["true"])
        ran = time.perf_counter()
        await sandbox.__aexit__()
        starts.append(started - begun)
        commands.append(ran - started)
        ends.append(time.perf_counter() - ran)
    return tuple(1000 * statistics.median(times) for times in (starts, commands, ends))  # type: ignore[return-value]


async def all_at_once(make: Make, count: int, at_once: int) -> float:
    """Seconds until `count` sandboxes have been started, each has run a command, and all are alive."""
    places = asyncio.Semaphore(at_once)

    async def start() -> MachineSandbox:
        async with places:
            sandbox = make()
            await sandbox.__aenter__()
            assert (await sandbox.exec("echo up")).out == "up\n"
            return sandbox

    begun = time.perf_counter()
    sandboxes = await asyncio.gather(*(start() for _ in range(count)))
    seconds = time.perf_counter() - begun
    await asyncio.gather(*(sandbox.__aexit__() for sandbox in sandboxes))
    return seconds


def prepared(folder: Path, files: int) -> Path:
    """A tree of small files, a hundred to a folder."""
    for number in range(files):
        path = folder / f"part{number // 100}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * 50)
    return folder


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--files", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = prepared(Path(folder) / "tree", given.files)
        rows: dict[str, Make] = {"subprocess": SubprocessSandbox}
        for via in ("unshare", "bwrap"):
            if (why := unavailable_reason(via)) is not None:
                print(f"local by {via}: none here: {why}")
                continue
            rows[f"local by {via}"] = lambda via=via: LocalSandbox(via=via)
            for how in ("overlay", "copy"):
                rows[f"local by {via}, {given.files} files by {how}"] = lambda via=via, how=how: LocalSandbox(
                    via=via, files=Snapshot(tree, how=how)
                )
        print(f"{'':44}{'start':>9}{'command':>9}{'end':>9}{'x subprocess':>14}{f'{given.count} started':>14}")
        base = None
        for name, make in rows.items():
            start, command, end = await one_by_one(make, 9)
            base = base or start
            seconds = await all_at_once(make, given.count, given.at_once)
            print(
                f"{name:44}{start:6.1f} ms{command:6.1f} ms{end:6.1f} ms{start / base:14.2f}{seconds:12.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
