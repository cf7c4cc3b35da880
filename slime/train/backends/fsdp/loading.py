"""Hugging Face folders as models that training can run."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from slime.config import Config
from slime.models.loading import load_causal_lm
from slime.models.value import put_value_head
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.packed_model import PolicyModel, ValueModel


def load_policy(config: Config, folder: str, dtype: torch.dtype) -> PolicyModel:
    """A language model; float32 for one that is trained (its master weights), the compute dtype for a frozen one."""
    model = _load(config, folder, dtype)
    sampled = config.loss_type != "sft_loss"  # answers that were read were sampled at no temperature
    temperature = config.rollout_temperature if sampled else 1.0
    return PolicyModel(model, temperature=temperature, chunk_rows=config.log_probs_chunk_size)


def load_critic(config: Config, folder: str, dtype: torch.dtype) -> ValueModel:
    """A language model's body with a new value head."""
    model = _load(config, folder, dtype)
    put_value_head(model)
    return ValueModel(model)


def _load(config: Config, folder: str, dtype: torch.dtype) -> PreTrainedModel:
    register_packed_attention()
    return load_causal_lm(
        folder,
        dtype=dtype,
        device="cpu",
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=config.trust_remote_code,
    )
