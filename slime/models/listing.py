"""`slime models`: the published models whose shape is known, their config.json, their flags, their scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from slime.models.families.family import FAMILIES, family_of
from slime.models.model_args import model_args, scripts
from slime.models.published import Published, published_model, published_models
from slime.models.shape import ModelShape


def models_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="slime models",
        description="Published models whose shape is known. NAME prints the config.json of one.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one model")
    parser.add_argument("--args", action="store_true", help="its shape in Megatron's flags instead, one a line")
    parser.add_argument(
        "--layout", action="store_true", help="GPUs and Megatron layout that it fits on, as flags of plan"
    )
    parser.add_argument("--write", metavar="DIR", help="a folder with its config.json alone, to plan with")
    parser.add_argument(
        "--random-weights", metavar="DIR", help="a folder that runs: random weights of its shape, a tokenizer of bytes"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of random weights")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="another value in its config.json, such as num_hidden_layers=4; several times if need be",
    )
    parser.add_argument("--scripts", metavar="DIR", help="write scripts/models/*.sh of all models")
    given = parser.parse_args(list(words))
    if given.scripts is not None:
        for name, text in scripts().items():
            (Path(given.scripts) / name).write_text(text, encoding="utf-8")
    elif given.name is None:
        print(table(), end="")
    else:
        _show_or_write(published_model(given.name).with_fields(given.set), given)
    return 0


def _show_or_write(model: Published, given: argparse.Namespace) -> None:
    if given.random_weights is not None:
        from slime.models.random_model import write_random_model  # which takes seconds to import

        write_random_model(model.config, Path(given.random_weights), dtype=given.dtype, seed=given.seed)
    elif given.write is not None:
        model.write(Path(given.write))
    elif given.layout:
        print(*layout_words(model))
    elif given.args:
        print(*model_args(model.config), sep="\n")
    else:
        print(json.dumps(model.config, indent=2))


def layout_words(model: Published) -> list[str]:
    """Flags with which `slime plan` shows the model on the GPUs that its layout is for."""
    nodes, gpus, _ = model.cluster.split("x")
    trainers = ["--actor-num-nodes", nodes, "--actor-num-gpus-per-node", gpus]
    return ["--plan-cluster", model.cluster, *trainers, "--colocate", "--train-backend", "megatron", *model.layout]


def table() -> str:
    """A line a model: name, family, parameters, of them active, layers."""
    lines = [f"{'name':<26}{'family':<20}{'parameters':>12}{'a token':>10}{'layers':>8}"]
    for name, model in published_models().items():
        shape = ModelShape.from_config(model.config)
        total, active = shape.num_parameters or 0, shape.active_parameters or 0
        family = family_of(model.config).name
        lines.append(f"{name:<26}{family:<20}{total / 1e9:>10.2f} B{active / 1e9:>8.2f} B{shape.num_layers or 0:>8}")
    return "\n".join(lines) + "\n"


def families_markdown() -> str:
    """The table of docs/models.md: what runs each family."""
    lines = ["| family | `model_type` | embedded engine | FSDP | Megatron |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        kinds = ", ".join(f"`{kind}`" for kind in family.model_types)
        runs = [said or "yes" for said in (family.support.engine, family.support.fsdp, family.support.megatron)]
        lines.append(f"| {family.name} | {kinds} | {' | '.join(runs)} |")
    return "\n".join(lines) + "\n"
