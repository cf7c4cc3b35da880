"""Whether the quickstart learns: every seed, and other roundings of the same numbers, each from random weights on.

    python benchmarks/quickstart_seeds.py
    python benchmarks/quickstart_seeds.py --jobs 5          # five at a time, each on its own share of the cores
    python benchmarks/quickstart_seeds.py --only modes      # seeds | numerics | modes | lora

`numerics` repeats the first two seeds with one and two threads, with ATen's portable kernels and with oneDNN's bf16
products where the CPU has them: sums are added up in another order or with fewer bits, as on another machine. `modes`
are the asynchronous ones, `lora` trains adapters of several ranks in the third step. Times are wall-clock; with
`--jobs` above 1 they tell nothing. Exit code 1 if any run ends below 90 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.cluster.devices import bfloat16_unit  # noqa: E402

EXPECTED = 0.90
NUMERICS: dict[str, dict[str, str]] = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "portable kernels": {"ATEN_CPU_CAPABILITY": "default"},
}
if bfloat16_unit() is not None:
    NUMERICS["bf16 products"] = {"DNNL_DEFAULT_FPMATH_MODE": "BF16", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}
MODES = ("partial", "one-step", "full")
LORA_RANKS = (4, 16)


class Case(NamedTuple):
    seed: int
    variant: str
    env: dict[str, str]
    mode: str = "sync"
    lora_rank: int = 0


class Outcome(NamedTuple):
    case: Case
    before: float | None
    after: float | None
    warm_up_s: float
    grpo_s: float
    problem: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--only", choices=["seeds", "numerics", "modes", "lora"], nargs="+", default=["seeds", "numerics"]
    )
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    todo = cases(args.seeds, args.only)
    console = Console(highlight=False)
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch_version()}, {len(todo)} runs")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda numbered: run(numbered[1], Path(folder) / str(numbered[0])), enumerate(todo)):
            outcomes.append(outcome)
            console.print(
                f"  seed {outcome.case.seed}, {outcome.case.variant}: {percent(outcome.after)}", soft_wrap=True
            )
    console.print(table(outcomes))
    missed = [one for one in outcomes if one.after is None or one.after < EXPECTED]
    for one in missed:
        console.print(f"seed {one.case.seed}, {one.case.variant}: below {EXPECTED:.0%}. {one.problem}")
    return 1 if missed else 0


def cases(seeds: list[int], kinds: list[str]) -> list[Case]:
    todo = []
    if "seeds" in kinds:
        todo += [Case(seed, "as it comes", {}) for seed in seeds]
    if "numerics" in kinds:
        todo += [Case(seed, name, env) for name, env in NUMERICS.items() for seed in seeds[:2]]
    if "modes" in kinds:
        todo += [Case(seed, mode, {}, mode) for mode in MODES for seed in seeds[:2]]
    if "lora" in kinds:
        todo += [Case(seed, f"LoRA, rank {rank}", {}, lora_rank=rank) for rank in LORA_RANKS for seed in seeds]
    return todo


def run(case: Case, folder: Path) -> Outcome:
    """One quickstart in a process of its own; its scores come from the run's metrics file."""
    command = [sys.executable, "-m", "slime.cli", "quickstart", "--output-dir", str(folder)]
    command += ["--seed", str(case.seed), "--mode", case.mode, "--lora-rank", str(case.lora_rank)]
    began = grpo_began = time.monotonic()
    tail: list[str] = []
    with subprocess.Popen(
        command, env=os.environ | case.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = [*tail[-4:], line.strip()]
            if line.startswith("3/3"):
                grpo_began = time.monotonic()
    ended = time.monotonic()
    scores = held_out(folder / "metrics.jsonl")
    first, last = (scores[0], scores[-1]) if scores and process.returncode in (0, 1) else (None, None)
    return Outcome(case, first, last, grpo_began - began, ended - grpo_began, " | ".join(tail))


def held_out(metrics: Path) -> list[float]:
    if not metrics.is_file():
        return []
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["eval/held-out"] for record in records if record["kind"] == "eval"]


def table(outcomes: list[Outcome]) -> Table:
    table = Table("seed", "numerics", "after the warm-up", "after GRPO", "warm-up s", "GRPO s")
    for one in outcomes:
        times = f"{one.warm_up_s:.0f}", f"{one.grpo_s:.0f}"
        table.add_row(str(one.case.seed), one.case.variant, percent(one.before), percent(one.after), *times)
    return table


def percent(share: float | None) -> str:
    return "failed" if share is None else f"{share:.1%}"


def torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


if __name__ == "__main__":
    sys.exit(main())
