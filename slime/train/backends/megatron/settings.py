"""Megatron's classes of settings, filled from the model, the flags and the layout.

Invariant: what the model is comes from its config.json, what a flag says from the flag, how processes share it from the
layout; a flag of Megatron's that is carried along is set under the field it means, and one that means none is refused.
Numbers are those of the other backend: gradients are sums, nothing is dropped out, routers are not balanced.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from slime.config import Config
from slime.config.megatron_flags import MEGATRON_CLASSES, MEGATRON_FLAGS, SHAPE
from slime.errors import UserError
from slime.train.backends.megatron.layout import Layout

Settings = TypeVar("Settings", TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
Value = Any


_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_pytorch_tanh": lambda states: functional.gelu(states, approximate="tanh"),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DEFAULTS: dict[str, Value] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "deallocate_pipeline_outputs": True,
    "cuda_graph_scope": [],
}
"""Where Megatron's own defaults would change numbers, or keep memory for nothing."""

_OTHER_NAMES: dict[str, tuple[str, Callable[[Value], Value]]] = {
    "decoder_first_pipeline_num_layers": ("num_layers_in_first_pipeline_stage", int),
    "decoder_last_pipeline_num_layers": ("num_layers_in_last_pipeline_stage", int),
    "microbatch_group_size_per_virtual_pipeline_stage": ("microbatch_group_size_per_vp_stage", int),
    "overlap_p2p_communication_warmup_flush": ("overlap_p2p_comm_warmup_flush", bool),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", lambda given: not given),
    "no_rope_fusion": ("apply_rope_fusion", lambda given: not given),
    "no_bias_swiglu_fusion": ("bias_activation_fusion", lambda given: not given),
    "no_bias_gelu_fusion": ("bias_activation_fusion", lambda given: not given),
    "no_bias_dropout_fusion": ("bias_dropout_fusion", lambda given: not given),
    "no_masked_softmax_fusion": ("masked_softmax_fusion", lambda given: not given),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", lambda given: not given),
    "no_persist_layer_norm": ("persist_layer_norm", lambda given: not given),
    "no_check_for_nan_in_loss_and_grad": ("check_for_nan_in_grad", lambda given: not given),
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", bool),
    "ddp_bucket_size": ("bucket_size", int),
    "moe_token_dispatcher_type": (
        "moe_token_dispatcher_type",
        lambda given: "alltoall" if given == "allgather" else given,
    ),
    "attention_backend": ("attention_backend", lambda given: AttnBackend[given]),
    "main_grads_dtype": ("main_grads_dtype", lambda given: _DTYPES[given]),
    "main_params_dtype": ("main_params_dtype", lambda given: _DTYPES[given]),
    "exp_avg_dtype": ("exp_avg_dtype", lambda given: _DTYPES[given]),
    "exp_avg_sq_dtype": ("exp_avg_sq_dtype", lambda given: _DTYPES[given]),
}
"""Flags whose field has another name, or takes another kind of value."""


def transformer_config(
    fields: Mapping[str, Any],
    config: Config,
    layout: Layout,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> TransformerConfig:
    """Of a model with these `fields` (what its family says of it)."""
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    values = {
        **_DEFAULTS,
        **{name: value for name, value in fields.items() if name in _names(kind)},
        **_given(kind, config),
        **_parallel(layout),
        **_computed(compute_dtype, device),
        "transformer_impl": _implementation(config, device),
    }
    if (activation := values.get("activation_func")) in _ACTIVATIONS:
        values["activation_func"] = _ACTIVATIONS[activation]
    if not values.get("num_moe_experts"):
        dispatcher = "moe_token_dispatcher_type"  # asked about without experts too
        values = {name: value for name, value in values.items() if not name.startswith("moe_") or name == dispatcher}
    made = _made(kind, values)
    for name, value in fields.items():
        if name.startswith("yarn_"):  # GPTModel looks for these on the settings, which do not declare them
            setattr(made, name, value)
    return made


def ddp_config(config: Config, layout: Layout) -> DistributedDataParallelConfig:
    """How gradients are added up over the ranks with other samples: as sums, in float32."""
    values = {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # a gradient that is not finite is found by its norm
        **_given(DistributedDataParallelConfig, config),
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_grad_reduce": config.overlap_grad_reduce,
        "overlap_param_gather": config.overlap_param_gather and config.use_distributed_optimizer,
    }
    return _made(DistributedDataParallelConfig, values)


def optimizer_config(config: Config, *, compute_dtype: torch.dtype) -> OptimizerConfig:
    """Adam as the other backend has it; rates are set before each update, and clipping is not left to it."""
    values = {
        **_given(OptimizerConfig, config),
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_param_gather": config.overlap_param_gather and config.use_distributed_optimizer,
        "bf16": compute_dtype == torch.bfloat16,
        "params_dtype": compute_dtype,
        "fp16": False,
    }
    return _made(OptimizerConfig, values)


def unknown_flags(config: Config) -> list[str]:
    """Carried flags of Megatron's that are no field of its settings, as they were given."""
    known = {
        name for kind in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig) for name in _names(kind)
    }
    carried = [name for name in config.carried if name.replace("_", "-") in MEGATRON_FLAGS]
    return [name for name in carried if _OTHER_NAMES.get(name, (name,))[0] not in known]


def _computed(compute_dtype: torch.dtype, device: torch.device) -> dict[str, Value]:
    """What no flag changes: the dtypes, and what the passes of this backend count on."""
    return {
        "params_dtype": compute_dtype,
        "pipeline_dtype": compute_dtype,
        "autocast_dtype": compute_dtype,
        "bf16": compute_dtype == torch.bfloat16,
        "fp16": False,
        "perform_initialization": False,
        "use_cpu_initialization": device.type != "cuda",
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "mtp_num_layers": None,
        "moe_grouped_gemm": True,
    }


def _parallel(layout: Layout) -> dict[str, Value]:
    interleaved = layout.virtual > 1
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if interleaved else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        # interleaved stages train wrongly, and without a word, in the other mode
        **({"overlap_p2p_comm": True, "batch_p2p_comm": False} if interleaved else {}),
    }


def _implementation(config: Config, device: torch.device) -> str:
    installed = importlib.util.find_spec("transformer_engine") is not None
    chosen = config.transformer_impl
    if chosen is None:
        return "transformer_engine" if installed and device.type == "cuda" else "local"
    if chosen == "transformer_engine" and not (installed and device.type == "cuda"):
        missing = "is not installed" if device.type == "cuda" else "needs a GPU"
        raise UserError(f"--transformer-impl transformer_engine: it {missing}; drop the flag for plain torch")
    return str(chosen)


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _given(kind: type, config: Config) -> dict[str, Value]:
    """What flags say of the fields of one class: those of this project that have Megatron's name, and carried ones."""
    names = _names(kind)
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values = {}
    for flag, value in {**own, **config.carried}.items():
        if MEGATRON_CLASSES.get(flag.replace("_", "-")) == SHAPE:
            continue  # compared with the model, which has the last word
        field, convert = _OTHER_NAMES.get(flag, (flag, None))
        if field in names and value is not None:
            values[field] = value if convert is None else convert(value)
    return values


def _made(kind: type[Settings], values: Mapping[str, Value]) -> Settings:
    """One of Megatron's classes; what its own checks find is a user's mistake."""
    try:
        return kind(**{name: value for name, value in values.items() if name in _names(kind)})
    except (ValueError, AssertionError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"Megatron refuses these settings: {said or 'no reason given'}") from error
