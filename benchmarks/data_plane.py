"""From engine answers to training arrays, without a model: what a token costs on its way, before and after.

    python benchmarks/data_plane.py
    python benchmarks/data_plane.py --only answers,journal

"Before" is the code of the time when samples were Python lists (`data_plane_before.py`), run in the same process on the
same answers. Synthetic engines: bodies as SGLang sends them, `--tokens` tokens each. Where the old way would take
minutes or many gigabytes, it is measured on less and scaled by what its cost grows with; such figures have a `~`.

memory    bytes held per token of a finished sample: columns alone, and with its text
answers   tokens per second from the bytes of an answer to a sample, on one core
loop      milliseconds that one answer, and one sample written to the journal, keep the event loop from other work
ready     seconds to look for groups that are too old, over one rollout of `--groups` x `--group-size` samples
turns     milliseconds to append the turns of an agent, in all
batch     seconds from `--samples` samples to the messages of `--ranks` ranks, sent
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import os
import platform
import socket
import sqlite3
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_plane_before as before
import numpy as np
from rich.console import Console
from rich.table import Table

from slime.cluster.rpc.channel import channel_pair
from slime.config import Config
from slime.data.buffer import Journal
from slime.data.sample import Sample
from slime.engine.http.codec import parse_json
from slime.engine.http.protocol import GenerateResult
from slime.rollout.outcomes import group_version
from slime.train.microbatch_plan import build_schedule
from slime.train.samples.batch import make_train_batch
from slime.train.samples.dp_shards import rank_shares

VOCABULARY = 150_000
CHARACTERS = 3.5
"""Of text in a token, on average."""


@dataclass
class Row:
    """One line of the table; `scaled` marks a figure of the old way that was not measured in full."""

    what: str
    unit: str
    before: float
    after: float
    target: str = ""
    scaled: bool = False
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.more_is_better else self.before / self.after


class Answers:
    """Bodies of `/generate` as an engine sends them: log-probs are float32 written as decimal numbers."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.tokens = tokens

    def body(self) -> bytes:
        ids = self._rng.integers(256, VOCABULARY, self.tokens).tolist()
        log_probs = (-self._rng.exponential(0.4, self.tokens)).astype(np.float32).astype(float).tolist()
        answer = {
            "text": "abcdefg" * int(self.tokens * CHARACTERS / 7),
            "output_ids": ids,
            "meta_info": {
                "id": "0123456789abcdef",
                "finish_reason": {"type": "stop", "matched": 2},
                "prompt_tokens": 200,
                "completion_tokens": self.tokens,
                "cached_tokens": 0,
                "weight_version": "7",
                "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=True)],
            },
        }
        return json.dumps(answer, separators=(",", ":")).encode()


def prompt(kind: type, index: int = 0) -> Any:
    return kind(index=index, group_index=index, tokens=list(range(1000, 1200)))


def answered(body: bytes, sample: Sample) -> Sample:
    """What the client and `generate` do with an answer."""
    result = GenerateResult.from_json(parse_json(body), url="http://engine")
    sample.append_response_tokens(
        tokens=result.id_array, log_probs=result.log_prob_array, meta_info=result.meta_info, text=result.text
    )
    return sample


def finished(body: bytes, index: int = 0) -> Sample:
    """A sample that has landed."""
    sample = answered(body, prompt(Sample, index))
    sample.reward = 1.0
    sample.compact()
    return sample


def seconds(call: Callable[[], object], least: float = 1.0) -> float:
    """Of one call: the fastest of several, repeated for `least` seconds."""
    call()
    taken, began = [], time.perf_counter()
    while time.perf_counter() - began < least:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def memory(options: argparse.Namespace) -> list[Row]:
    """What stays allocated after an answer has become a finished sample."""
    answers = Answers(options.tokens)
    bodies = [answers.body() for _ in range(4)]

    def held(make: Callable[[bytes], Any], *, text: bool) -> float:
        make(bodies[0])
        gc.collect()
        tracemalloc.start()
        kept = [make(body) for body in bodies]
        if not text:
            for sample in kept:
                sample.response = ""
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size / len(kept) / options.tokens

    def old(body: bytes) -> Any:
        return before.make_answer(body, prompt(before.ListSample))

    return [
        Row("memory, columns", "bytes/token", held(old, text=False), held(finished, text=False), "<= 12"),
        Row(f"memory, with text of {CHARACTERS} bytes", "bytes/token", held(old, text=True), held(finished, text=True)),
    ]


def answers(options: argparse.Namespace) -> list[Row]:
    """Parsing, checking and appending; long answers and short ones."""
    rows = []
    for tokens in (options.tokens, 512):
        body = Answers(tokens).body()
        old = seconds(lambda body=body: before.make_answer(body, prompt(before.ListSample)))
        new = seconds(lambda body=body: answered(body, prompt(Sample)))
        target = ">= 1500" if tokens == options.tokens else ""
        what = f"answers of {tokens} tokens"
        rows.append(Row(what, "1000 tokens/s", tokens / old / 1e3, tokens / new / 1e3, target, more_is_better=True))
    return rows


async def longest_pause(work: Callable[[], Any], times: int) -> float:
    """Milliseconds that one call keeps the loop from other work, in all; the median over `times` calls."""
    return float(np.median([await _pause(work) for _ in range(times)])) * 1e3


async def _pause(work: Callable[[], Any]) -> float:
    spent, done = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal spent
        while not done.is_set():
            start = time.perf_counter()
            await asyncio.sleep(0)
            late = time.perf_counter() - start
            spent += late if late > 2e-4 else 0.0

    watcher = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    result = work()
    if asyncio.iscoroutine(result):
        await result
    await asyncio.sleep(0)
    done.set()
    await watcher
    return spent


def loop(options: argparse.Namespace) -> list[Row]:
    """One sample into the journal."""
    bodies = [Answers(options.tokens, seed).body() for seed in range(8)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        journal = Journal(Path(folder) / "journal.sqlite", {"model": "benchmark"}, keep=True)
        journal.recover(0)
        samples = [finished(body, index) for index, body in enumerate(bodies)]
        journal.hand_out([[sample] for sample in samples], None)
        olds = [before.make_answer(body, prompt(before.ListSample)) for body in bodies]

        def old_record() -> None:
            payload = before.journal_payload(olds.pop())
            file.execute("INSERT INTO samples (payload) VALUES (?)", (payload,))

        def new_record() -> Any:
            sample = samples.pop()
            return journal.record(sample, sample)

        with closing(sqlite3.connect(Path(folder) / "old.sqlite", isolation_level=None)) as file:
            file.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; CREATE TABLE samples (payload)")
            old = asyncio.run(longest_pause(old_record, 6))
        new = asyncio.run(longest_pause(new_record, 6))
        journal.close()
    return [Row(f"event loop, one journaled sample of {options.tokens}", "ms", old, new)]


def ready(options: argparse.Namespace) -> list[Row]:
    """Groups arrive one after another. Before: after each, all that are ready are looked at; now each once."""
    groups, size, tokens = options.groups, options.group_size, options.tokens
    body = Answers(tokens).body()
    few = 8
    old_group = [before.make_answer(body, prompt(before.ListSample)) for _ in range(2)]
    old_ready = [old_group for _ in range(few)]
    one_look = seconds(lambda: before.refuse_stale(old_ready, 8, 2)) / (few * len(old_group))
    old = one_look * size * groups * (groups + 1) / 2
    group: list[Any] = [finished(body, index) for index in range(size)]
    assert group_version(group) == 7
    new = seconds(lambda: [group_version(group) for _ in range(groups)])
    return [Row(f"ready groups, {groups} x {size} x {tokens}", "s", old, new, scaled=True)]


def turns(options: argparse.Namespace) -> list[Row]:
    """An agent of 100 turns: each appends what was sampled, then what a tool said."""
    count, sampled, told = 100, options.tokens // 200, options.tokens // 200
    ids, log_probs, tool = list(range(1000, 1000 + sampled)), [-0.5] * sampled, list(range(told))

    def run(sample: Any, new: bool) -> None:
        for _ in range(count):
            if new:
                sample.append_response_tokens(tokens=ids, log_probs=log_probs)
                sample.append_response_tokens(tokens=tool, trainable=False)
            else:
                sample.append(ids, log_probs, "", "7")
                sample.append(tool, [0.0] * told, "", "7")

    old = seconds(lambda: run(prompt(before.ListSample), False)) * 1e3
    new = seconds(lambda: run(prompt(Sample), True)) * 1e3
    return [Row(f"turns, {count} x {sampled + told} tokens", "ms", old, new)]


def batch(options: argparse.Namespace) -> list[Row]:
    """Samples of 8k tokens; the old way has a tenth of them, in memory for all of which it would take 7 GB."""
    tokens, samples, ranks = 8192, options.samples, options.ranks
    body, fewer = Answers(tokens).body(), max(1, samples // 10)
    config = Config(hf_checkpoint="unused", rollout_batch_size=samples // 8, n_samples_per_prompt=8)

    def schedule(lengths: list[int]) -> Any:
        return build_schedule(
            lengths, list(range(len(lengths))), num_ranks=ranks, global_batch_size=len(lengths),
            micro_batch_size=1, max_tokens=None, trainable=[True] * len(lengths),
        )  # fmt: skip

    def old_way() -> None:
        columns = before.arrays(olds)
        plan = schedule([len(one) for one in columns["tokens"]])
        send([before.share_of_rank(columns, plan.steps, rank) for rank in range(ranks)])

    def new_way() -> None:
        prepared = make_train_batch(config, news)
        send(rank_shares(prepared, schedule(prepared.total_lengths)))

    olds = [before.make_answer(body, prompt(before.ListSample)) for _ in range(min(fewer, 200))]
    olds = [olds[place % len(olds)] for place in range(fewer)]
    old = once(old_way) * samples / fewer
    olds.clear()
    made = [finished(body, index) for index in range(min(samples, 200))]
    news = [copy.copy(made[index % len(made)]) for index in range(samples)]  # as with the old way: memory for 200
    for index, sample in enumerate(news):
        sample.index, sample.group_index = index, index // 8
    return [Row(f"batch, {samples} x {tokens}, {ranks} ranks", "s", old, once(new_way), "<= 5", scaled=True)]


def send(shares: Sequence[Any]) -> None:
    """Through channels to readers that take the bytes and look at nothing."""
    for share in shares:
        channel, theirs = channel_pair()
        reader = threading.Thread(target=_drain, args=(theirs,))
        reader.start()
        channel.send(share)
        channel.close()
        reader.join()
        theirs.close()


def _drain(end: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while end.recv_into(buffer):
        pass


def once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "memory": memory, "answers": answers, "loop": loop, "ready": ready, "turns": turns, "batch": batch,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="of one answer")
    parser.add_argument("--groups", type=int, default=512, help="ready groups of a rollout")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=10_000, help="of a batch")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=None, help="where the journal is made, and removed again")
    options = parser.parse_args()
    table = Table(title=f"data plane, {platform.machine()}, {os.cpu_count()} cores", box=None, pad_edge=False)
    for name in ("what", "unit", "before", "after", "ratio", "target"):
        table.add_column(name, justify="left" if name in ("what", "unit") else "right")
    for name in options.only.split(",") if options.only else PARTS:
        for row in PARTS[name](options):
            old = f"{'~' if row.scaled else ''}{row.before:,.4g}"
            table.add_row(row.what, row.unit, old, f"{row.after:,.4g}", f"{row.ratio:.1f}x", row.target)
    Console().print(table)


if __name__ == "__main__":
    main()
