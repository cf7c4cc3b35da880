"""Megatron's config classes, filled from the model, the flags and the layout.

Invariant: the shape of the model comes from its config.json, flags set what they name, and the layout sets how
processes share the model. Every other field of Megatron's classes is set by the flag of its name
(`slime.config.megatron_flags`). Results equal those of the FSDP backend: gradients are sums, dropout is off, and
routers are not balanced.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TypeVar

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
from slime.models.families.weight_map import Fields
from slime.train.backends.megatron.layout import Layout

Settings = TypeVar("Settings", TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)

_DEFAULTS: Fields = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "deallocate_pipeline_outputs": True,
    "cuda_graph_scope": [],
}
"""Values for fields whose own defaults in Megatron would change results or waste memory."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_RENAMED_FIELDS: dict[str, str] = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}
"""Fields with another name than their flag, by the name of the flag."""

_CONVERTERS: dict[str, Callable[..., object]] = {
    "attention_backend": AttnBackend.__getitem__,
    "exp_avg_dtype": _DTYPES.__getitem__,
    "exp_avg_sq_dtype": _DTYPES.__getitem__,
    "moe_token_dispatcher_type": lambda given: "alltoall" if given == "allgather" else given,
}
"""Conversions for fields whose type differs from their flag's, or that do not take all of its values."""


def transformer_config(
    fields: Fields,
    config: Config,
    layout: Layout,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> TransformerConfig:
    """Build the config of a model from the `fields` of its family, the flags and the layout."""
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    interleaved = layout.virtual > 1
    values = {
        **_DEFAULTS,
        **{name: value for name, value in fields.items() if name in _names(kind)},
        **_flag_values(kind, config, device.type),
        # fields that no flag changes: parallel sizes, dtypes, and what the passes of this backend require
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if interleaved else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        # the other mode silently trains interleaved stages wrongly
        **({"overlap_p2p_comm": True, "batch_p2p_comm": False} if interleaved else {}),
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
        "transformer_impl": _transformer_impl(config, device),
    }
    values["activation_func"] = {  # Megatron compares functions by identity
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "quick_gelu": fused_bias_geglu.quick_gelu,
    }[values["activation_func"]]
    if values.get("experimental_attention_variant") == "gated_delta_net":
        # it enables checks for Megatron's own layer, which lacks context parallelism; the layer used here has it
        del values["experimental_attention_variant"]
    if not values.get("num_moe_experts"):
        dispatcher = "moe_token_dispatcher_type"  # checked without experts too
        values = {name: value for name, value in values.items() if not name.startswith("moe_") or name == dispatcher}
    made = _build_config(kind, values)
    for name, value in fields.items():
        if name.startswith("yarn_"):  # GPTModel reads these from the config, which does not declare them
            setattr(made, name, value)
    return made


def ddp_config(config: Config, layout: Layout) -> DistributedDataParallelConfig:
    """Build the config of the gradient reduction over data-parallel ranks: sums in float32."""
    values = {
        **_flag_values(DistributedDataParallelConfig, config, _device_type()),
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # the gradient norm shows non-finite gradients
        "overlap_grad_reduce": config.overlap_grad_reduce and layout.data * layout.context > 1,
        "overlap_param_gather": config.overlap_param_gather and config.use_distributed_optimizer,
    }
    return _build_config(DistributedDataParallelConfig, values)


def optimizer_config(config: Config, *, compute_dtype: torch.dtype) -> OptimizerConfig:
    """Build the config of Adam, equal to the FSDP backend's. The rates are set before each update."""
    values = {
        **_flag_values(OptimizerConfig, config, _device_type()),
        "overlap_param_gather": config.overlap_param_gather and config.use_distributed_optimizer,
        "bf16": compute_dtype == torch.bfloat16,
        "fp16": False,
        "params_dtype": compute_dtype,
    }
    return _build_config(OptimizerConfig, values)


def _transformer_impl(config: Config, device: torch.device) -> str:
    if not uses_transformer_engine(config, device.type):
        return "local"
    if device.type != "cuda" or importlib.util.find_spec("transformer_engine") is None:
        missing = "is not installed" if device.type == "cuda" else "needs a GPU"
        raise UserError(f"--transformer-impl transformer_engine: it {missing}; drop the flag for plain torch")
    return "transformer_engine"


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _device_type() -> str:
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def _flag_values(kind: type, config: Config, device_type: str) -> Fields:
    """Return the fields of one class that flags set: flags of slime under Megatron's names, and carried flags."""
    own = {
        _RENAMED_FIELDS.get(field.name, field.name): getattr(config, field.name) for field in dataclasses.fields(config)
    }
    found = {**own, **given_settings(config.carried)}
    has_engine = uses_transformer_engine(config, device_type)
    unused = unused_fields(transformer_engine=has_engine, on_gpu=device_type == "cuda")
    values = {name: found[name] for name in (_names(kind) & found.keys()) - unused if found[name] is not None}
    return {name: _CONVERTERS[name](value) if name in _CONVERTERS else value for name, value in values.items()}


def _build_config(kind: type[Settings], values: Fields) -> Settings:
    """Build one of Megatron's config classes, and raise UserError if its own checks fail."""
    try:
        return kind(**{name: value for name, value in values.items() if name in _names(kind)})
    except (ValueError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"Megatron refuses these settings: {reason or 'no reason given'}") from error
