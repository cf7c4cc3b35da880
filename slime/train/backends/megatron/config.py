"""Megatron's classes of settings, filled from the model, the flags and the layout.

Invariant: what the model is comes from its config.json, what a flag says from the flag, how processes share it from the
layout. Whatever else Megatron's classes have is set by the flag of its name (`slime.config.megatron_flags`).
Numbers are those of the other backend: gradients are sums, nothing is dropped out, routers are not balanced.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions import fused_bias_geglu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from slime.config import Config
from slime.config.megatron_flags import given_settings, unused_fields
from slime.config.parallelism import uses_transformer_engine
from slime.errors import UserError
from slime.train.backends.megatron.layout import Layout

Settings = TypeVar("Settings", TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
Value = Any

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

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_OTHER_NAMES: dict[str, str] = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}
"""Flags of the config whose field has another name."""

_CONVERTED: dict[str, Callable[[Any], Value]] = {
    "attention_backend": AttnBackend.__getitem__,
    "exp_avg_dtype": _DTYPES.__getitem__,
    "exp_avg_sq_dtype": _DTYPES.__getitem__,
    "moe_token_dispatcher_type": lambda given: "alltoall" if given == "allgather" else given,
}
"""Fields that take another kind of value than their flag, or not all of its values."""


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
        **_given(kind, config, device.type),
        **_parallel(layout),
        **_computed(compute_dtype, device),
        "transformer_impl": _implementation(config, device),
    }
    values["activation_func"] = _activation(values["activation_func"])
    if values.get("experimental_attention_variant") == "gated_delta_net":
        # checks made for Megatron's own layer, which cannot share sequences; the one used here can
        del values["experimental_attention_variant"]
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
        **_given(DistributedDataParallelConfig, config, _device_type()),
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # a gradient that is not finite is found by its norm
        "overlap_grad_reduce": config.overlap_grad_reduce and layout.data * layout.context > 1,
        "overlap_param_gather": config.overlap_param_gather and config.use_distributed_optimizer,
    }
    return _made(DistributedDataParallelConfig, values)


def optimizer_config(config: Config, *, compute_dtype: torch.dtype) -> OptimizerConfig:
    """Adam as the other backend has it. Its rates are those before each update."""
    values = {
        **_given(OptimizerConfig, config, _device_type()),
        "overlap_param_gather": config.overlap_param_gather and config.use_distributed_optimizer,
        "bf16": compute_dtype == torch.bfloat16,
        "fp16": False,
        "params_dtype": compute_dtype,
    }
    return _made(OptimizerConfig, values)


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
    if not uses_transformer_engine(config, device.type):
        return "local"
    if device.type != "cuda" or importlib.util.find_spec("transformer_engine") is None:
        missing = "is not installed" if device.type == "cuda" else "needs a GPU"
        raise UserError(f"--transformer-impl transformer_engine: it {missing}; drop the flag for plain torch")
    return "transformer_engine"


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that Megatron knows under this name; it compares functions, so it has to be that one."""
    return {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "quick_gelu": fused_bias_geglu.quick_gelu,
    }[name]


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _device_type() -> str:
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def _given(kind: type, config: Config, device_type: str) -> dict[str, Value]:
    """What flags say of the fields of one class: the config's under Megatron's names, and those carried along."""
    own = {
        _OTHER_NAMES.get(field.name, field.name): getattr(config, field.name) for field in dataclasses.fields(config)
    }
    found = {**own, **given_settings(config.carried)}
    has_engine = uses_transformer_engine(config, device_type)
    unused = unused_fields(transformer_engine=has_engine, on_gpu=device_type == "cuda")
    values = {name: found[name] for name in (_names(kind) & found.keys()) - unused if found[name] is not None}
    return {name: _CONVERTED[name](value) if name in _CONVERTED else value for name, value in values.items()}


def _made(kind: type[Settings], values: Mapping[str, Value]) -> Settings:
    """One of Megatron's classes; what its own checks find is a user's mistake."""
    try:
        return kind(**{name: value for name, value in values.items() if name in _names(kind)})
    except (ValueError, AssertionError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"Megatron refuses these settings: {said or 'no reason given'}") from error
