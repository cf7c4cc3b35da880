"""Makes plans/*.txt and the table of README.md: what `slime plan` says of each recipe, for each number of GPUs.

    python examples/recipes/plans.py

A plan is for GPUs of 80 GiB; the table has those of 141 GiB beside them. Nothing is downloaded: shapes are enough.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from slime.config import parse_args
from slime.driver.plan.plan import Plan, make_plan
from slime.driver.plan.schedule import planned_machines
from slime.models.catalog import published_model

HERE = Path(__file__).resolve().parent
GIB = 2**30
SIZES = (80, 141)
BEGIN, END = "<!-- made by plans.py -->", "<!-- until here -->"


def recipes() -> list[Path]:
    return sorted(HERE.glob("run-*.sh"))


def gpu_counts(script: Path) -> list[int]:
    """The numbers of GPUs that a recipe has, the smallest first."""
    found = re.search(r"^sizes (.*)$", script.read_text(), re.MULTILINE)
    assert found is not None, f"{script} names no sizes"
    return sorted(map(int, found[1].split()))


def words(script: Path, **env: str) -> list[str]:
    """What a recipe gives to the interpreter, its program left out."""
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Path(scratch) / "recorder"
        recorder.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
        recorder.chmod(0o755)
        done = subprocess.run(
            [str(script)],
            env={"PATH": os.environ["PATH"], "PYTHON": str(recorder), **env},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{script.name}: {done.stderr}")
    return done.stdout.split("\0")[1:-1]


def planned(script: Path, gpus: int, gib: int) -> Plan:
    """The plan of a recipe, as `PLAN=80 NUM_GPUS=8 run-....sh` prints it."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        shape = shape_of(script, gpus)
        folder = f"outputs/recipes/{shape}-shape"
        published_model(shape).write(Path(folder))
        given = words(script, PLAN=str(gib), NUM_GPUS=str(gpus), HF_CHECKPOINT=str(Path(folder).resolve()))
        given = [folder if word.endswith(folder) else word for word in given]
        config = parse_args(given)
        found = planned_machines(config)
        return make_plan(config, device=found.device, gpu_count=found.gpus)


def shape_of(script: Path, gpus: int) -> str:
    """The name of `slime models` that a recipe uses for so many GPUs."""
    text = script.read_text()
    found = re.search(r"^model (\S+) ", text, re.MULTILINE)
    assert found is not None, f"{script} names no model"
    if found[1] != '"$SHAPE"':
        return found[1]
    by_size = re.search(rf"^    {gpus}\)(?:\n.*?)*?\bSHAPE=(\S+)", text, re.MULTILINE)
    assert by_size is not None, f"{script} names no model for {gpus} GPUs"
    return by_size[1]


def row(script: Path, gpus: int) -> str:
    """A line of the table: what trainers and engines take, and whether that fits."""
    plans = [planned(script, gpus, gib) for gib in SIZES]
    memory = [{one.name: one.memory.total / GIB for one in plan.processes if one.memory is not None} for plan in plans]
    engines = " / ".join(f"{found['engine']:.0f}" for found in memory)
    lacking = [
        f"{gib}: {(plan.lacks or 0) / GIB:.0f} GiB too few"
        for gib, plan in zip(SIZES, plans, strict=True)
        if plan.lacks != 0
    ]
    fits = ", ".join(lacking) or "yes"
    name = script.stem.removeprefix("run-")
    adapter = ", an adapter" if "--lora-rank" in words_of_size(script, gpus) else ""
    plan = f"[{name}](run-{name}.sh) | {shape_of(script, gpus)}{adapter} | [{gpus}](plans/{name}-{gpus}.txt)"
    return f"| {plan} | {memory[0]['trainer']:.0f} | {engines} | {fits} |"


def words_of_size(script: Path, gpus: int) -> list[str]:
    return words(script, PLAN="80", NUM_GPUS=str(gpus), HF_CHECKPOINT=str(HERE))


def table() -> str:
    head = ["| recipe | model | GPUs | trainer, GiB | engine, GiB of 80 / 141 | fits |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *(row(script, gpus) for script in recipes() for gpus in gpu_counts(script))])


def main() -> None:
    for script in recipes():
        for gpus in gpu_counts(script):
            file = HERE / "plans" / f"{script.stem.removeprefix('run-')}-{gpus}.txt"
            file.write_text(planned(script, gpus, SIZES[0]).render(), encoding="utf-8")
    readme = HERE / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
