"""The framework's own time a step: from finished samples to every rank having its share, with no model and no engine.

    python benchmarks/scale.py
    python benchmarks/scale.py --ranks 512 --samples 100000 --tokens 32768 --schedules tokens
    python benchmarks/scale.py --ranks 64 --samples 10000 --profile

A real `TrainerGroup` trains on synthetic samples. Its ranks are simulated: each has a channel of its own, and a few
real processes (`--processes`) answer for all of them, as soon as they have the arrays of their share in hand. Shares go
through shared memory as to ranks on the driver's machine, or over the channels as to others (`--ways`). What does not
fit into memory is skipped, with the bytes it would take.

landing    microseconds a sample, not in the step: what a finished sample costs while others are still sampled, when its
           columns are looked at and put into shared memory; with `--late` nothing is done then, but in the step
journal    microseconds a sample, not in the step: what the journal takes, in the same wait of the trainers, to make a
           batch of samples that it recorded when they finished; of the first 1,000 (`--journal` says how many) alone,
           since their rows are written into a temporary folder
batch      samples to columns: rewards of groups, masks, checks of log-probs
schedule   who computes what, in which order; `--schedules` names the ways
rest       ids, metrics, the cut into shares
write      into shared memory what is not there yet
send       from the first request to the last rank's answer
per 1e5    the whole step for 100,000 such samples: constant where time is linear in samples
GB         what the ranks receive; every data-parallel rank has its own share
peak       MiB of the driver beyond the samples themselves, and of the fullest receiving process with all of its ranks
           (its own memory, without what it shares with the driver)
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import platform
import pstats
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from slime.cluster.memory.arena import SharedArena
from slime.cluster.node import NodeProcess
from slime.cluster.rpc.channel import Channel, ChannelClosed, ChannelPoller, channel_pair
from slime.config import Config
from slime.data.buffer import Journal
from slime.data.sample import ArrayMover, Sample
from slime.train import trainer_group
from slime.train.flops import FlopsModel
from slime.train.microbatch_plan import build_schedule
from slime.train.processes import Rank, RankProcesses, TrainerRendezvous
from slime.train.samples.batch import TrainBatch, make_train_batch
from slime.train.samples.dp_shards import ShardTransfer, open_share
from slime.train.trainer_group import TrainerGroup, TrainResult

GROUP_SIZE = 8
LONGEST = 32768
MEDIAN = 600
PROMPT = 200
BYTES_PER_TOKEN = 9
"""Of a sample: id, log-prob and mask."""
SMALL_MODEL = FlopsModel(per_token=6e9, per_pair=4.0 * 16 * 128, layers_by_window={None: 28})
PARTS = ("batch", "schedule", "rest", "write", "send")
SCHEDULES: dict[str, dict[str, Any]] = {
    "samples": {"micro_batch_size": 1},
    "tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": LONGEST},
    "flops": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": LONGEST, "balance_data": True},
    "flops-equal": {"micro_batch_size": 1, "balance_data": True},
    "by-flops": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": LONGEST, "balance_by_flops": True},
}


@dataclass
class Spent:
    """Seconds by part, of one step."""

    parts: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - begin

    @property
    def columns(self) -> list[float]:
        """The parts in the order of the table, and all of it."""
        named = self.parts | {"rest": self.whole - sum(self.parts.values())}
        return [*(named.get(part, 0.0) for part in PARTS), self.whole]


class SimulatedRank:
    """A rank that another process answers for; it never ends before the run does."""

    log_path = Path("unused")

    def __init__(self, number: int) -> None:
        self.name = f"rank-{number}"

    def said(self, text: str | None) -> None:
        """Nobody looks."""

    def poll(self) -> int | None:
        return None

    def state(self) -> str:
        return self.name


class SimulatedRanks(RankProcesses):
    """Channels like those of real ranks, with a few processes at their other ends."""

    def __init__(self, config: Config, processes: int) -> None:
        super().__init__(config, device="cpu", run_dir=Path("unused"))
        self._num_processes = min(processes, self.world_size)
        self._receivers: list[subprocess.Popen[bytes]] = []

    def launch(self) -> list[TrainerRendezvous]:
        ends: list[socket.socket] = []
        for number in range(self.world_size):
            channel, theirs = channel_pair()
            self.ranks.append(Rank(cast(NodeProcess, SimulatedRank(number)), channel))
            ends.append(theirs)
        for first in range(self._num_processes):
            own = [end.fileno() for end in ends[first :: self._num_processes]]
            words = [sys.executable, __file__, "--receive", ",".join(map(str, own))]
            self._receivers.append(subprocess.Popen(words, pass_fds=own))
        for end in ends:
            end.close()
        return []

    def stop(self) -> None:
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.channel.close()
        for receiver in self._receivers:
            receiver.wait()


class TimedArena(SharedArena):
    """With a clock around what is written at the step."""

    def __init__(self, spent: Callable[[], Spent]) -> None:
        super().__init__()
        self._spent = spent

    def _written(self, stack: ExitStack, arrays: Sequence[np.ndarray]) -> tuple[dict[int, str], list[int]]:
        with self._spent().on("write"):
            return super()._written(stack, arrays)


class TimedGroup(TrainerGroup):
    """The group as it is, with a clock around its parts."""

    def __init__(self, config: Config, processes: int, *, through_memory: bool, folder: str) -> None:
        super().__init__(config, device="cpu", run_dir=folder)
        self._arena = TimedArena(lambda: self.spent)
        self._hand_over = ShardTransfer(self._arena)
        self._here, self._shares_memory = [through_memory] * self.world_size, through_memory
        self.processes = SimulatedRanks(config, processes)
        self.spent = Spent()
        self.receivers_mib = 0.0

    def open(self) -> None:
        self.processes.launch()
        self._data_ranks, self._data_size = list(range(self.world_size)), self.world_size
        self._flops = SMALL_MODEL if self.config.balance_data or self.config.balance_by_flops else None

    def train(self, rollout_id: int, samples_by_group: Sequence[object], *, last: bool = False) -> TrainResult:
        def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                with self.spent.on(part):
                    return function(*args, **options)

            return call

        def send(method: str, params: Sequence[dict[str, Any]]) -> list[Any]:
            answers = RankProcesses.call(self.processes, method, params)
            self.receivers_mib = max(answer["mib"] for answer in answers)
            return answers

        with (
            patch.object(trainer_group, "make_train_batch", timed("batch", make_train_batch)),
            patch.object(trainer_group, "build_schedule", timed("schedule", build_schedule)),
            patch.object(self.processes, "call", timed("send", send)),
        ):
            return super().train(rollout_id, samples_by_group, last=last)


def receive(fds: Sequence[int]) -> None:
    """The other ends: answer for these ranks until the driver goes."""
    channels = [Channel.from_fd(fd) for fd in fds]
    kept: dict[int, TrainBatch] = {}
    listening = ChannelPoller(channels)
    try:
        while True:
            for place in listening.ready(3600.0):
                request = channels[place].recv(None)
                kept[place] = open_share(request["params"]["data"])
                perf = {"perf/data_preprocess_time": 0.0, "perf/train_time": 0.0}
                result = {"metrics": [], "rollout_metrics": perf, "logged": [], "warnings": [], "is_skipped": False}
                result["mib"] = status("VmHWM") / 2**20
                channels[place].send({"id": request["id"], "ok": True, "result": result})
    except ChannelClosed:
        return


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def available_bytes() -> int:
    """Memory that can be had now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this benchmark reads /proc/meminfo: Linux only")


def lengths_of(tokens: str, count: int, seed: int = 0) -> np.ndarray:
    """Tokens of each sample: all alike, or mixed as responses are."""
    if tokens != "mixed":
        return np.full(count, int(tokens))
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), 1.0, count)
    return np.clip(drawn, 2 * 16, LONGEST).astype(np.int64)


def make_samples(lengths: np.ndarray, masked: float, keep: ArrayMover | None) -> tuple[list[list[Sample]], float]:
    """Groups of finished samples, each put where it stays by `keep` as it finishes, and the seconds of that; `masked`
    of them have turns that are not trained on."""
    landing = 0.0
    rng = np.random.default_rng(1)
    drawn_ids = rng.integers(0, 150_000, 2 * LONGEST, dtype=np.int32)
    drawn_log_probs = -rng.random(2 * LONGEST, dtype=np.float32)
    samples = []
    for index, length in enumerate(lengths.tolist()):
        prompt = min(PROMPT, length // 2)
        sample = Sample(index=index, group_index=index // GROUP_SIZE, tokens=list(range(prompt)))
        begin = int(rng.integers(0, LONGEST))  # a part of what was drawn once: drawing takes longer than the step
        sampled = drawn_ids[begin : begin + length - prompt]
        log_probs = drawn_log_probs[begin : begin + length - prompt]
        turns = 8 if rng.random() < masked and length > 64 else 1
        for turn, (ids, probs) in enumerate(
            zip(np.array_split(sampled, turns), np.array_split(log_probs, turns), strict=True)
        ):
            told = turn % 2 == 1
            sample.append_response_tokens(tokens=ids, log_probs=None if told else probs, trainable=not told)
        sample.reward = float(rng.integers(0, 2))
        sample.status = Sample.Status.COMPLETED
        sample.compact()
        if keep is not None:
            since = time.perf_counter()
            sample.keep_with(keep)
            landing += time.perf_counter() - since
        samples.append(sample)
    return [samples[begin : begin + GROUP_SIZE] for begin in range(0, len(samples), GROUP_SIZE)], landing


@dataclass
class Case:
    way: str
    schedule: str
    ranks: int


def refusal(lengths: np.ndarray, ways: Sequence[str]) -> str | None:
    """Why a case does not fit here: its samples, or once more what the ranks get."""
    needed = 2 * BYTES_PER_TOKEN * int(lengths.sum())
    free, room = available_bytes(), shutil.disk_usage("/dev/shm").free
    if needed < 0.8 * free and (needed / 2 < room or "memory" not in ways):
        return None
    have = f"{free / 2**30:.1f} are free, {room / 2**30:.1f} in /dev/shm"
    return f"SKIPPED: they take {needed / 2**30:.1f} GiB, half of it for the ranks (--ways memory: in /dev/shm); {have}"


@dataclass
class Measured:
    spent: Spent
    landing: float  # seconds of all samples
    journal: float  # seconds a sample
    driver_mib: float  # the driver's peak
    receiver_mib: float


def measure(case: Case, lengths: np.ndarray, options: argparse.Namespace) -> Measured:
    """The second of two steps (the first one starts what is started once)."""
    config = Config(
        hf_checkpoint="unused", rollout_batch_size=-(-len(lengths) // GROUP_SIZE), n_samples_per_prompt=GROUP_SIZE,
        num_steps_per_rollout=options.steps, actor_num_gpus_per_node=case.ranks, **SCHEDULES[case.schedule],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        group = TimedGroup(config, options.processes, through_memory=case.way == "memory", folder=folder)
        with group:
            group.open()
            groups, landing = make_samples(lengths, options.masked, None if options.late else group.keep)
            group.train(0, groups, last=True)
            group.spent = Spent()
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
            before, begin = status("VmRSS"), time.perf_counter()
            with profiled(options.profile):
                group.train(1, groups, last=True)
            group.spent.whole = time.perf_counter() - begin
            peak = status("VmHWM")
            journal = assigning(groups[: -(-options.journal // GROUP_SIZE)], Path(folder) / "journal.sqlite")
            return Measured(group.spent, landing, journal, (peak - before) / 2**20, group.receivers_mib)


def assigning(groups: list[list[Sample]], path: Path) -> float:
    """Seconds a sample to make a batch of groups that the journal has recorded as they finished."""
    if not groups:
        return 0.0
    journal = Journal(path, {"model": "benchmark"}, keep=True)
    for group in groups:
        prompts = [Sample(index=sample.index, group_index=sample.group_index) for sample in group]
        journal.hand_out([prompts], None)
        for prompt, sample in zip(prompts, group, strict=True):
            journal.produced(prompt, sample)
    begin = time.perf_counter()
    journal.assign(0, groups, {})
    seconds = time.perf_counter() - begin
    journal.close()
    return seconds / sum(map(len, groups))


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="data-parallel ranks")
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 1000, 10_000, 100_000], help="of one step")
    parser.add_argument("--tokens", default="mixed", help="of each sample: a number, or mixed lengths (default)")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["tokens"])
    parser.add_argument("--ways", nargs="+", choices=("memory", "channels"), default=["memory"])
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of one rollout")
    parser.add_argument("--masked", type=float, default=0.25, help="part of the samples that have tool turns")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that answer for all ranks")
    parser.add_argument("--journal", type=int, default=1000, help="samples that a journal records, for its column")
    parser.add_argument("--late", action="store_true", help="samples are not put into shared memory when they finish")
    parser.add_argument("--profile", action="store_true", help="print where the driver's time goes")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive([int(fd) for fd in options.receive.split(",")])
        return
    title = f"own time, {options.tokens} tokens a sample, {platform.machine()}, {os.cpu_count()} cores"
    table = Table(title=title, box=None, pad_edge=False)
    names = (
        "way",
        "by",
        "ranks",
        "samples",
        "landing",
        "journal",
        *PARTS,
        "whole s",
        "per 1e5",
        "GB",
        "driver peak",
        "receiver peak",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("way", "by") else "right")
    skipped = []
    for count in options.samples:
        lengths = lengths_of(options.tokens, count)
        if (why := refusal(lengths, options.ways)) is not None:
            skipped.append(f"{count:,} samples of {options.tokens} tokens {why}")
            continue
        for way, schedule, ranks in product(options.ways, options.schedules, options.ranks):
            found = measure(Case(way, schedule, ranks), lengths, options)
            times = [*found.spent.columns, found.spent.whole * 1e5 / count]
            gb = BYTES_PER_TOKEN * int(lengths.sum()) / 1e9
            sizes = f"{gb:.2f}", f"{found.driver_mib:,.0f}", f"{found.receiver_mib:,.0f}"
            counts = str(ranks), f"{count:,}", f"{found.landing / count * 1e6:.0f}", f"{found.journal * 1e6:.0f}"
            table.add_row(way, schedule, *counts, *(f"{value:.3f}" for value in times), *sizes)
    console = Console(width=160)
    console.print(table)
    for line in skipped:
        console.print(line)


if __name__ == "__main__":
    main()
