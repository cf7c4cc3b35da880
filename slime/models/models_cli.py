"""`slime models`: the published models whose shape is known, their config.json, their flags, their scripts."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.models.catalog import Published, published_model, published_models
from slime.models.families.family import FAMILIES, family_of
from slime.models.families.weight_map import Fields
from slime.models.shape import ModelShape

# A model's shape in Megatron's flags, as `scripts/models/*.sh` give it in MODEL_ARGS.
#
# Invariant: every field that a family reads from config.json is a flag here, has the value Megatron assumes without
# one, or is named as no flag.

_VALUES = {"layernorm_epsilon": "norm-epsilon", "num_moe_experts": "num-experts"}
"""Fields whose flag has another name; the others are called as the field is."""
_SWITCHES = {
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "rope_scaling": "use-rope-scaling",
    **{
        name: name.replace("_", "-")
        for name in (
            "add_qkv_bias",
            "attention_output_gate",
            "moe_grouped_gemm",
            "moe_router_enable_expert_bias",
            "moe_router_pre_softmax",
            "moe_shared_expert_gate",
            "multi_latent_attention",
            "post_mlp_layernorm",
            "post_self_attn_layernorm",
            "qk_layernorm",
            "rotary_interleaved",
        )
    },
}
_ABSENT = {
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
}
"""Flags that say that something is not there."""
_ASSUMED: dict[str, Any] = {
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "rope_scaling_factor": 8.0,
    "moe_router_topk_scaling_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "q_lora_rank": None,
}
"""What Megatron takes without the flag."""
_NO_FLAGS = (
    "hidden_dropout",
    "attention_dropout",
    "max_sequence_length",
    "latent_layernorm_epsilon",
    "dsa_indexer_layers",
    "activation_func",
    "gated_linear_unit",
    "position_embedding_type",
)
_GLUE = "\0"
_NOT_WITH_LATENTS = ("num_query_groups", "kv_channels")


def model_args(config: dict[str, Any]) -> list[str]:
    """MODEL_ARGS of a config.json, with `--dense-layers` for Megatron's list of layers that have experts."""
    fields = family_of(config).fields(config)
    latent = bool(fields.get("multi_latent_attention"))
    words = [*_activation(fields), *_positions(fields)]
    if not latent:
        words.append("--group-query-attention")
    for name, value in fields.items():
        if name in _NO_FLAGS or (latent and name in _NOT_WITH_LATENTS) or name.startswith("yarn_"):
            continue
        if name in _ASSUMED and value == _ASSUMED[name]:
            continue
        words += _words(name, value)
    return words


def _words(name: str, value: Any) -> list[str]:
    if name in _SWITCHES:
        return [f"--{_SWITCHES[name]}"] if value else []
    if name in _ABSENT:
        return [] if value else [f"--{_ABSENT[name]}"]
    if name == "moe_layer_freq":
        return ["--dense-layers", str(_leading_zeros(value))]
    if name == "linear_attention_freq":
        return ["--linear-attention-freq", str(value.index(0) + 1)]
    if name in ("window_size", "window_attn_skip_freq"):
        return [
            f"--{name.replace('_', '-')}",
            ",".join(map(str, value)) if name == "window_size" else str(_period(value)),
        ]
    return [f"--{_VALUES.get(name, name.replace('_', '-'))}", _text(value)]


def _activation(fields: Fields) -> list[str]:
    return ["--swiglu"] if fields["activation_func"] == "silu" else ["--quick-geglu"]


def _positions(fields: Fields) -> list[str]:
    if fields.get("multi_latent_attention"):
        return ["--position-embedding-type", "rope"]
    kind = fields["position_embedding_type"]
    return ["--use-rotary-position-embeddings"] if kind == "rope" else ["--position-embedding-type", kind]


def _leading_zeros(freq: list[int]) -> int:
    dense = freq.index(1)
    assert all(freq[dense:]), "layers without experts come first in every published model"
    return dense


def _period(freq: list[int]) -> int:
    """Every so many layers one is of the other kind."""
    return freq.index(0) + 1


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def script(model: Published) -> str:
    """The file of `scripts/models/` for one model."""
    words = ["model_args"]
    for word in model_args(model.config):  # a flag and its value stay in one line
        words[-1:] = [words[-1], word] if word.startswith("--") else [f"{words[-1]}{_GLUE}{word}"]
    lines = textwrap.wrap(" ".join(words), width=116, subsequent_indent="    ", break_on_hyphens=False)
    return (
        f"# {model.title}\n"
        "# Written by `slime models --scripts`; what it says stands in slime/models/published.json.\n"
        'source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"\n\n' + " \\\n".join(lines).replace(_GLUE, " ") + "\n"
    )


def scripts() -> dict[str, str]:
    """All of them, by file name."""
    return {f"{name}.sh": script(model) for name, model in published_models().items()}


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
