"""Flags and model configs set the fields of Megatron's configs; invalid settings raise a UserError."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from slime.config import Config
from slime.errors import UserError
from slime.models.families.family import family_of
from slime.train.backends.megatron.config import ddp_config, optimizer_config, transformer_config
from slime.train.backends.megatron.layout import Layout
from tests.family_models import BASE, FAMILY_MODELS

CPU = torch.device("cpu")


def make_config(
    case: str = "qwen3", layout: Layout | None = None, dtype: torch.dtype = torch.float32, **flags: Any
) -> TransformerConfig:
    model_type, own = FAMILY_MODELS[case]
    hf_config = {"model_type": model_type, **BASE, **own}
    fields = family_of(hf_config).fields(hf_config)
    return transformer_config(fields, Config(**flags), layout or Layout(), compute_dtype=dtype, device=CPU)


def test_model_shape_comes_from_the_hf_config() -> None:
    config = make_config("qwen3_moe_mixed")
    assert (config.num_layers, config.num_moe_experts, config.moe_router_topk) == (4, 4, 2)
    assert config.moe_layer_freq == [0, 1, 0, 1]
    assert config.activation_func is functional.silu
    assert config.qk_layernorm is True


def test_loss_is_per_token_and_dropout_and_router_losses_are_off() -> None:
    config = make_config("glm4_moe", calculate_per_token_loss=False, mtp_num_layers=1)
    assert config.calculate_per_token_loss is True, "Megatron divides by micro-batches otherwise"
    assert config.mtp_num_layers is None
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)
    assert config.moe_router_bias_update_rate == 0.0, "the biases of experts stay as they are"


def test_flags_set_their_fields_and_allgather_becomes_alltoall() -> None:
    config = make_config(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        moe_token_dispatcher_type="allgather",
        carried={"no_bias_dropout_fusion": True, "bias_activation_fusion": True, "deallocate_pipeline_outputs": False},
    )
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert config.moe_token_dispatcher_type == "alltoall"
    assert (config.bias_dropout_fusion, config.bias_activation_fusion) == (False, True)
    assert config.deallocate_pipeline_outputs is False


def test_flags_of_unavailable_kernels_are_ignored() -> None:
    kernels = {"moe_permute_fusion": True, "cp_comm_type": ["a2a"], "tp_comm_overlap": True}
    config = make_config("qwen3_moe", attention_backend="flash", carried=kernels)
    assert config.attention_backend is AttnBackend.auto
    assert (config.moe_permute_fusion, config.cp_comm_type, config.tp_comm_overlap) == (False, None, False)
    assert (
        optimizer_config(
            Config(carried={"use_precision_aware_optimizer": True}), compute_dtype=torch.float32
        ).use_precision_aware_optimizer
        is False
    )


def test_router_dtype_flag_overrides_the_default() -> None:
    assert make_config("qwen3_moe").moe_router_dtype == "fp32"
    assert make_config("qwen3_moe", carried={"moe_router_dtype": "fp64"}).moe_router_dtype == "fp64"


def test_shape_flags_do_not_override_the_model_config() -> None:
    assert make_config(carried={"num_layers": 48, "moe_layer_freq": "[1]*48"}).num_layers == BASE["num_hidden_layers"]


def test_interleaved_stages_overlap_p2p_communication() -> None:
    config = make_config(layout=Layout(2, pipeline=2, virtual=2))
    assert config.virtual_pipeline_model_parallel_size == 2
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    assert make_config(layout=Layout(2, pipeline=2)).virtual_pipeline_model_parallel_size is None


def test_first_pipeline_stage_can_have_its_own_layer_count() -> None:
    config = make_config(layout=Layout(2, pipeline=2), decoder_first_pipeline_num_layers=1)
    assert config.num_layers_in_first_pipeline_stage == 1


def test_params_use_the_compute_dtype_and_masters_float32() -> None:
    config = make_config(dtype=torch.bfloat16)
    assert (config.params_dtype, config.pipeline_dtype, config.bf16) == (torch.bfloat16, torch.bfloat16, True)
    optimizer = optimizer_config(Config(adam_beta2=0.9), compute_dtype=torch.bfloat16)
    assert (optimizer.bf16, optimizer.main_params_dtype, optimizer.adam_beta2) == (True, torch.float32, 0.9)


def test_gradients_are_summed_in_float32() -> None:
    settings = ddp_config(Config(overlap_grad_reduce=True, carried={"bucket_size": 1000}), Layout(2))
    assert (settings.grad_reduce_in_fp32, settings.overlap_grad_reduce, settings.bucket_size) == (True, True, 1000)


def test_settings_refused_by_megatron_raise_user_error() -> None:
    with pytest.raises(UserError, match=r"Megatron refuses these settings: num_attention_heads \(8\) must be"):
        make_config(layout=Layout(3, tensor=3))
    with pytest.raises(UserError, match="--transformer-impl transformer_engine: it needs a GPU"):
        make_config(transformer_impl="transformer_engine")
