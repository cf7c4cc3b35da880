"""Prints the plan of each published model on the GPUs that its layout is for, as a table.

With `--families`: the engine and backends that support each family, the table of docs/models.md.

    python tools/model_plans.py [--families]

The workload is 32 prompts x 8 samples of up to 8,192 response tokens, packed to 16,384 tokens a pass of the processes
that share it, activations of whole layers recomputed, trainers and engines on the same GPUs, of which engines give
their memory back while the others train.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slime.config import parse_args
from slime.driver.plan.megatron import estimate_trainer
from slime.models.catalog import PublishedModel, published_models
from slime.models.families.family import FAMILIES
from slime.models.models_cli import layout_words
from slime.models.shape import ModelShape

WORKLOAD = (
    "--label-key label --rm-type math --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 100 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 16384 --rollout-max-response-len 8192 --offload-rollout "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)


LETTERS = {
    "--tensor-model-parallel-size": "TP",
    "--pipeline-model-parallel-size": "PP",
    "--decoder-last-pipeline-num-layers": "last stage",
    "--context-parallel-size": "CP",
    "--expert-model-parallel-size": "EP",
    "--expert-tensor-parallel-size": "expert TP",
    "--sequence-parallel": "SP",
    "--train-backend": "trainer",
}


def main() -> None:
    print(families_table() if sys.argv[1:] == ["--families"] else table(), end="")


def families_table() -> str:
    lines = ["| family | `model_type` | embedded engine | FSDP | Megatron |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        kinds = ", ".join(f"`{kind}`" for kind in family.model_types)
        runs = [said or "yes" for said in (family.support.engine, family.support.fsdp, family.support.megatron)]
        lines.append(f"| {family.name} | {kinds} | {' | '.join(runs)} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    lines = ["| model | parameters | GPUs | layout | GiB a trainer |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(row(name, model) for name, model in published_models().items())]) + "\n"


def row(name: str, model: PublishedModel) -> str:
    shape = ModelShape.from_config(model.config)
    nodes, gpus, gib = (int(part) for part in model.cluster.split("x"))
    with tempfile.TemporaryDirectory() as scratch:
        model.write(Path(scratch))
        (Path(scratch) / "prompts.jsonl").write_text(json.dumps({"input": "1+1", "label": "2"}) + "\n")
        words = ["--hf-checkpoint", scratch, "--prompt-data", f"{scratch}/prompts.jsonl", *WORKLOAD.split()]
        config = parse_args([*words, *layout_words(model), "--dry-run"])
        memory = estimate_trainer(config, shape, device="cuda", trainers=nodes * gpus)
    layout = short(model.layout)
    total = (shape.num_parameters or 0) / 1e9
    return f"| {name} | {total:.1f} B | {nodes} x {gpus} of {gib} GiB | {layout} | {memory.total / 2**30:.0f} |"


def short(words: Sequence[str]) -> str:
    """The flags of a layout by their usual letters."""
    said = []
    for flag, value in zip(words, [*words[1:], ""], strict=False):
        if flag in LETTERS:
            said.append(f"{LETTERS[flag]} {value}".rstrip() if not value.startswith("--") else LETTERS[flag])
    return ", ".join(said) or "DP alone"


if __name__ == "__main__":
    main()
