"""Peak memory of a training rank beside what the plan says it takes.

    python benchmarks/training_memory.py                                   # 1, 2, 4 and 8 ranks on the CPU
    python benchmarks/training_memory.py --ranks 2 --set use_kl_loss=true --set recompute_activations=true
    python benchmarks/training_memory.py --device cuda --shape qwen3-0.6b --ranks 1 --tokens 8192

Each rank is a process of its own with a real `Trainer` that makes rollout steps of `--micro-batches` micro-batches;
what counts is a step that finds Adam's moments there. The plan's number is `slime.driver.plan.memory.trainer_memory` of
the same flags. "allocated" is what torch's allocator gave out at most: on a GPU its own statistics, on the CPU the sum
of the allocations that torch's profiler saw, of the rank with the least: the ranks have equal work, and what threads of
gloo set free is not seen. "resident" is what the system had to give for it: on a GPU what the allocator reserved, on
the CPU the high-water mark of anonymous memory, over that of the process after it trained a tiny model; freed memory
goes back to the system at once. The CPU allocator of torch for aarch64 rounds sizes up, by up to a quarter.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from workload import make_model

from slime.cluster.devices import threads_per_process
from slime.config import Config, derive
from slime.config.batch import num_trainers
from slime.data.sample import Sample
from slime.driver.plan.memory import trainer_memory
from slime.models.shape import ModelShape

MIB = 2**20
STEPS = ("first step", "step", "counted step")
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
RETURN_MEMORY |= {"MIMALLOC_PURGE_DELAY": "0"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured: one model, one set of flags, one number of ranks."""

    folder: str
    ranks: int
    device: str
    tokens: int
    micro_batches: int
    flags: dict[str, Any]

    def config(self, folder: str | None = None) -> Config:
        samples = self.ranks * self.micro_batches
        values = {
            "hf_checkpoint": folder or self.folder,
            "rollout_batch_size": samples,
            "n_samples_per_prompt": 1,
            "rollout_max_context_len": self.tokens,
            "rollout_max_response_len": self.tokens - self.tokens // 4,
            "num_rollout": len(STEPS),
            "actor_num_gpus_per_node": self.ranks,
            "lr": 1e-6,
            "device": self.device,
        }
        return derive(Config(**(values | self.flags)))

    def groups(self) -> list[list[Sample]]:
        """One sample a micro-batch, a quarter of it the prompt."""
        rng = np.random.default_rng(0)
        groups = []
        for index in range(self.ranks * self.micro_batches):
            response = self.tokens - self.tokens // 4
            sample = Sample(
                group_index=index, index=index, tokens=rng.integers(2, 90, self.tokens).tolist(),
                response_length=response, loss_mask=[1] * response, status=Sample.Status.COMPLETED,
                reward=float(index % 2), rollout_log_probs=[-5.0] * response,
            )  # fmt: skip
            groups.append([sample])
        return groups


class HostPeak:
    """This process's anonymous memory, as Linux counts it, and the tensors in it, as the profiler does."""

    def __init__(self) -> None:
        gc.collect()
        self._before = self._status()["RssAnon"]
        self._restart()

    def over(self, work: Callable[[], None], *, count: bool = False) -> dict[str, int]:
        self._restart()
        found: dict[str, int] = {}
        if count:
            found["allocated"] = self._counted(work)
        else:
            work()
        status = self._status()
        found["resident"] = status["VmHWM"] - status["RssFile"] - status["RssShmem"] - self._before
        gc.collect()
        found["at rest"] = self._status()["RssAnon"] - self._before
        return found

    def _restart(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def _counted(self, work: Callable[[], None]) -> int:
        """Bytes of tensors at most: those there are, and what the profiler sees come and go."""
        from torch.profiler import ProfilerActivity, profile

        there = _bytes_of_tensors()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return there + int(np.cumsum(changes).max())

    @staticmethod
    def _status() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _bytes_of_tensors() -> int:
    import torch

    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            storage = getattr(found, "_local_tensor", found).untyped_storage()
            if storage.device.type == "cpu":
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class DevicePeak:
    """What torch's allocator gave out and reserved at most."""

    def over(self, work: Callable[[], None], *, count: bool = False) -> dict[str, int]:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        found = {"allocated": torch.cuda.max_memory_allocated(), "resident": torch.cuda.max_memory_reserved()}
        gc.collect()
        return found | {"at rest": torch.cuda.memory_allocated()}


def measure(case: Case, scratch: Path) -> dict[str, dict[str, int]]:
    """Peaks of this rank by what it was doing; runs in a process of its own."""
    from slime.train.processes import TrainerRendezvous
    from slime.train.topology import join_ranks

    ranks = join_ranks(case.device, meeting=TrainerRendezvous(str(scratch / "store")), timeout_minutes=5)
    warm = Rank(dataclasses.replace(case, tokens=16), str(scratch / "tiny"), ranks)
    warm.load()
    warm.train(0)
    del warm
    peak = HostPeak() if case.device == "cpu" else DevicePeak()
    rank = Rank(case, case.folder, ranks)
    found = {"load": peak.over(rank.load)}
    for rollout_id, name in enumerate(STEPS):
        found[name] = peak.over(lambda at=rollout_id: rank.train(at), count=name == "counted step")
    out = scratch / f"export-{ranks.rank}"
    out.mkdir()
    found["export"] = peak.over(lambda: rank.export(out), count=True)
    return found


class Rank:
    """A trainer, fed the way the driver does."""

    def __init__(self, case: Case, folder: str, ranks: Any) -> None:
        self.case = case
        self.config = case.config(folder)
        self.ranks = ranks

    def load(self) -> None:
        from slime.train.trainer import Trainer

        self.trainer = Trainer(self.config, self.case.device)
        self.place = self.trainer.init(self.ranks)

    def train(self, rollout_id: int) -> None:
        from slime.train.microbatch_plan import build_schedule
        from slime.train.samples.batch import flatten_samples, make_train_batch
        from slime.train.samples.dp_shards import rank_shares

        batch = make_train_batch(self.config, flatten_samples(self.case.groups()))
        schedule = build_schedule(
            batch.total_lengths,
            batch.rollout_ids,
            num_ranks=self.place["data_size"],
            global_batch_size=self.config.global_batch_size,
            micro_batch_size=1,
            trainable=batch.trainable,
            fill_last=True,
        )
        self.trainer.train(rollout_id, rank_shares(batch, schedule)[self.place["data_rank"]])

    def export(self, out: Path) -> None:
        self.trainer.sender.export_weights(str(out), 1)


def run_ranks(case: Case, scratch: Path) -> list[dict[str, dict[str, int]]]:
    """Start the ranks and wait for what each of them measured."""
    processes = []
    for rank in range(case.ranks):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
        env |= {"GLOO_SOCKET_IFNAME": "lo", **RETURN_MEMORY, **threads_per_process(case.ranks)}
        argv = [sys.executable, __file__, "--one-rank", json.dumps(dataclasses.asdict(case)), str(scratch)]
        processes.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed: its error is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    if sys.argv[1:2] == ["--one-rank"]:
        print(json.dumps(measure(Case(**json.loads(sys.argv[2])), Path(sys.argv[3]))))
        sys.stdout.flush()
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="75m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--tokens", type=int, default=256, help="of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of one rank in one step")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=JSON", help="a field of the config")
    args = parser.parse_args()
    flags = {name: json.loads(value) for name, value in (setting.split("=", 1) for setting in args.set)}
    flags["dtype"] = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    table = Table(title=f"{args.shape} on {args.device}, {flags}, {args.tokens} tokens; MiB", title_justify="left")
    for column in ("ranks", "allocated", "plan", "plan / allocated", "resident", "at rest", "load", "export"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made) / "model", args.shape, "float32")
        shape = ModelShape.from_folder(folder)
        for ranks in args.ranks:
            scratch = Path(made) / str(ranks)
            make_model(scratch / "tiny", "tiny", "float32")
            case = Case(str(folder), ranks, args.device, args.tokens, args.micro_batches, flags)
            found = run_ranks(case, scratch)
            config = case.config()
            plan = trainer_memory(config, shape, device=args.device, trainers=num_trainers(config))

            def most(what: str, kind: str, found: list[dict[str, dict[str, int]]] = found) -> int:
                return max(one[what][kind] for one in found)

            counts = [one["counted step"]["allocated"] for one in found]
            allocated = min(counts) if args.device == "cpu" else max(counts)
            table.add_row(
                str(ranks),
                f"{allocated / MIB:,.0f}",
                f"{plan.total / MIB:,.0f}",
                f"{plan.total / allocated:.2f}",
                f"{most('step', 'resident') / MIB:,.0f}",
                f"{most('step', 'at rest') / MIB:,.0f}",
                f"{most('load', 'resident') / MIB:,.0f}",
                f"{most('export', 'allocated') / MIB:,.0f}",
            )
            parts = {name: round(size / MIB, 1) for name, size in plan.parts.items()}
            print(json.dumps({"ranks": ranks, "flags": flags, "measured": found, "plan": parts}), flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
