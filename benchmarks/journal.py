"""Milliseconds and bytes of the journal: hand-out, finish, batch, consume, with 100,000 samples in the file; and what
it costs to keep the last rollouts and evaluations.

    python benchmarks/journal.py
    python benchmarks/journal.py --samples 20000 --folder /some/disk

Groups of 8 samples with 256 to 2048 response tokens, 32 groups in a rollout, nothing pruned. Prompts are handed out
group by group, samples finish one by one, and a batch is consumed as a whole; every call is one transaction of the real
journal. The table is of the last tenth of the calls, when the file is as large as it gets; `growth` is the ratio of
their mean to that of the first tenth. Then the same for a fifth of the samples with a checkpoint and an evaluation of
256 samples after each rollout, with nothing kept and with the default of 256 MB. Last, what a batch takes whose samples
were recorded as they ended and put into shared memory, as in a run: as they are, and when all have changed since.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from slime.cluster.memory.arena import SharedArena
from slime.data.buffer import Journal
from slime.data.sample import Sample

GROUP, BATCH = 8, 32
VOCABULARY = 150_000


class Clock:
    """Milliseconds of calls by name, with the number of samples in each."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def __call__(self, name: str, samples: int, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        self.calls[name].append(((time.perf_counter() - began) * 1e3, samples))


class Texts:
    """Responses as an engine would give them: ids, log-probs in float32, words."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._words = [f"w{number} " for number in range(2000)]

    def prompts(self, group_index: int) -> list[Sample]:
        prompt = "".join(self._rng.choice(self._words, 40))
        first = group_index * GROUP
        return [
            Sample(group_index=group_index, index=first + place, prompt=prompt, label="42", metadata={"source": "sums"})
            for place in range(GROUP)
        ]

    def finish(self, sample: Sample) -> Sample:
        count = int(self._rng.integers(256, 2049))
        ids = np.minimum(self._rng.zipf(1.2, count), VOCABULARY - 1)
        log_probs = -self._rng.exponential(0.4, count).astype(np.float32).astype(float)
        sample.tokens = list(range(60))
        sample.append_response_tokens(
            tokens=ids.tolist(),
            log_probs=log_probs.tolist(),
            text="".join(self._words[token % 2000] for token in ids.tolist()[: count // 2]),
            meta_info={"finish_reason": {"type": "stop"}, "weight_version": "7"},
        )
        sample.reward = float(self._rng.integers(0, 2))
        return sample


def fill(journal: Journal, samples: int, clock: Clock, texts: Texts, *, checkpoints: bool = False) -> None:
    """The life of `samples` samples, rollout by rollout, with `checkpoints` and evaluations after each."""
    journal.recover(0)
    for rollout in range(samples // (GROUP * BATCH)):
        batch = [texts.prompts(rollout * BATCH + place) for place in range(BATCH)]
        for place, group in enumerate(batch):
            position = {"epoch_id": 0, "sample_offset": rollout * BATCH + place + 1, "metadata": {}}
            clock("hand out", GROUP, lambda group=group, position=position: journal.hand_out([group], position))
        for sample in (sample for group in batch for sample in group):
            texts.finish(sample)
            clock("finish", 1, lambda sample=sample: journal.produced(sample, sample))
        metrics = {"rollout/raw_reward": 0.5}
        clock("batch", GROUP * BATCH, lambda batch=batch, r=rollout, m=metrics: journal.assign(r, batch, m))
        clock("consume", GROUP * BATCH, lambda rollout=rollout: journal.consumed(rollout))
        if checkpoints:
            clock("checkpoint", GROUP * BATCH, lambda rollout=rollout: journal.checkpointed(rollout))
            answers = {"sums": [sample for group in batch for sample in group]}
            clock("evaluation", GROUP * BATCH, lambda r=rollout, a=answers: journal.keep_evaluation(r + 1, a))


def batch_of_recorded(tokens: int, samples: int, folder: Path) -> tuple[float, float]:
    """Microseconds a sample of a batch whose samples are as they were recorded, and when all have changed since."""
    rng, arena = np.random.default_rng(0), SharedArena()
    journal = Journal(folder / f"{tokens}.sqlite", {"model": "benchmark"}, keep=True)
    groups = [Texts(seed=number).prompts(number) for number in range(samples // GROUP)]
    journal.hand_out(groups, None)
    for sample in (sample for group in groups for sample in group):
        sample.tokens = list(range(60))
        sample.append_response_tokens(
            tokens=rng.integers(0, VOCABULARY, tokens - 60),
            log_probs=-rng.random(tokens - 60, dtype=np.float32),
            text="word " * (tokens - 60),
            meta_info={"finish_reason": {"type": "stop"}, "weight_version": "7"},
        )
        sample.reward = 1.0
        journal.produced(sample, sample)
        sample.keep_with(arena.keep)
    taken = []
    for part in (groups[::2], groups[1::2]):
        began = time.perf_counter()
        journal.assign(len(taken), part, {})
        taken.append((time.perf_counter() - began) / (len(part) * GROUP) * 1e6)
        for sample in (sample for group in groups for sample in group):
            sample.reward = 0.5
    journal.close()
    arena.close()
    return taken[0], taken[1]


def report(console: Console, clock: Clock, file_bytes: int, samples: int, title: str) -> None:
    """The table and the size."""
    table = Table(title=f"{title}, milliseconds", box=None, pad_edge=False)
    for name in ("call", "samples", "mean", "p99", "mean per sample", "growth"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for name, calls in clock.calls.items():
        tenth = max(1, len(calls) // 10)
        times = np.array([milliseconds for milliseconds, _ in calls])
        last, per_call = times[-tenth:], calls[-1][1]
        table.add_row(
            name,
            str(per_call),
            f"{last.mean():.3f}",
            f"{np.percentile(last, 99):.3f}",
            f"{last.mean() / per_call:.4f}",
            f"{last.mean() / times[:tenth].mean():.2f}x",
        )
    console.print(table)
    console.print(f"file: {file_bytes / 1e6:.1f} MB, {file_bytes / samples:.0f} bytes per sample", highlight=False)


def main() -> None:
    """Fill a journal, measure, remove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="samples in the journal")
    parser.add_argument("--folder", type=Path, default=None, help="where the file is made, and removed again")
    options = parser.parse_args()
    samples = max(1, options.samples // (GROUP * BATCH)) * GROUP * BATCH
    clock, console = Clock(), Console()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        journal = Journal(Path(folder) / "journal.sqlite", {"model": "benchmark"}, keep=True)
        fill(journal, samples, clock, Texts(seed=0))
        began = time.perf_counter()
        journal.checkpointed(samples)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        recovered = journal.recover(samples // (GROUP * BATCH) - 1)
        recovery = time.perf_counter() - began
        assert len(recovered.batches) == 1
        journal.close()
        report(console, clock, journal.path.stat().st_size, samples, f"journal with {samples:,} samples")
        console.print(f"make durable: {seconds * 1e3:.0f} ms; recover: {recovery * 1e3:.0f} ms", highlight=False)
    for keep_bytes in (0, 256_000_000):
        clock = Clock()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            journal = Journal(Path(folder) / "j.sqlite", {"model": "benchmark"}, keep=False, keep_bytes=keep_bytes)
            fill(journal, samples // 5, clock, Texts(seed=0), checkpoints=True)
            journal.close()
            title = f"{samples // 5:,} samples with checkpoints, {keep_bytes / 1e6:.0f} MB kept"
            report(console, clock, journal.path.stat().st_size, samples // 5, title)
    for tokens, count in ((600, 4096), (32_768, 512)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            same, changed = batch_of_recorded(tokens, count, Path(folder))
        line = f"{same:.0f} us a sample, {changed:,.0f} if all have changed since"
        console.print(f"batch of recorded samples of {tokens:,} tokens: {line}", highlight=False)


if __name__ == "__main__":
    main()
