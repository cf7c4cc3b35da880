"""A model's shape in Megatron's flags, as `scripts/models/*.sh` give it in MODEL_ARGS.

Invariant: every field that a family reads from config.json is a flag here, has the value Megatron assumes without one,
or is named as no flag.
"""

from __future__ import annotations

import textwrap
from typing import Any

from slime.models.families.facts import Fields
from slime.models.families.family import family_of
from slime.models.published import Published, published_models

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
