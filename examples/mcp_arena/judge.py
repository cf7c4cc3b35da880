"""The judge as a server of its own, and how far its verdicts can be trusted."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from task import BILLS
from tournament import Match, ServedJudge
from tournament.rewards import Calls

from slime.cluster.process import guarded
from slime.data.sample import Sample
from slime.errors import RunFailed

READY = re.compile(r"ready on (http://[^\s:]+:\d+)")


@contextmanager
def serving(model: Path, device: str, log: Path) -> Iterator[str]:
    """The URL of an engine that serves `model` as long as the block lasts, and no longer than this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "slime.engine.embedded", "--model-path", str(model), "--device", device]
    command += ["--dtype", "float32", "--port", "0"]
    process = subprocess.Popen(
        guarded(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    said: SimpleQueue[str | None] = SimpleQueue()
    reader = threading.Thread(target=_keep, args=(process.stderr, log, said))
    reader.start()
    try:
        url = said.get()
        if url is None:
            raise RunFailed(f"the judge's engine ended before it was ready; see {log}")
        yield url
    finally:
        process.terminate()
        process.wait()
        reader.join()


def _keep(stream: IO[str], log: Path, said: SimpleQueue[str | None]) -> None:
    """Write what the engine says to its log; its address, once it is ready, to `said`, and None at its end."""
    with stream, log.open("w") as kept:
        for line in stream:
            kept.write(line)
            kept.flush()
            if found := READY.search(line):
                said.put(found[1])
    said.put(None)


def measured(judge: ServedJudge, *, pairs: int = 200, seed: int) -> str:
    """How the judge decides between prices that differ, asked in one order and in both, in a sentence."""
    rng = random.Random(seed)
    bills = [rng.sample(BILLS, 2) for _ in range(pairs)]
    reading = replace(judge, answer_of=lambda sample: sample.response)
    shares = []
    for swap in (False, True):
        scores = asyncio.run(_scores(Match(reading, swap=swap, tries=1), bills))
        right = sum(score == float(a < b) for (a, b), score in zip(bills, scores, strict=True))
        wrong = sum(score == float(a > b) for (a, b), score in zip(bills, scores, strict=True))
        shares += [right / pairs, wrong / pairs]
    return (
        f"the judge asked once is right about {shares[0]:.1%} of {pairs} pairs and wrong about {shares[1]:.1%}; asked "
        f"in both orders it is right about {shares[2]:.1%}, wrong about {shares[3]:.1%}, and the others are ties"
    )


async def _scores(match: Match, bills: list[list[int]]) -> list[float | None]:
    calls = Calls()
    pairs = [[Sample(response=str(cost)) for cost in pair] for pair in bills]
    return await asyncio.gather(*(match.score(Namespace(), first, second, calls) for first, second in pairs))
