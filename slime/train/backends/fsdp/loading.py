"""Hugging Face folders as models that training can run.

Invariant: a model comes without its weights, on the meta device; each rank reads its own part of them when the model is
sharded, so no process ever has a whole copy.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slime.algorithms.logprobs import KEPT_BYTES
from slime.config import Config
from slime.config.initial_weights import Start
from slime.models.meta_model import ModelOutline, outline_causal_lm
from slime.models.torch_dist.hugging_face import read_in_place_of
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.packed_model import PolicyModel, ValueModel


def load_policy(config: Config, source: Start, dtype: torch.dtype) -> PolicyModel:
    """A language model; float32 for one that is trained (its master weights), the compute dtype for a frozen one."""
    outline = _outline(config, source, dtype)
    sampled = config.loss_type != "sft_loss"  # answers that were read were sampled at no temperature
    keep = config.log_probs_keep_gib
    temperature = config.rollout_temperature if sampled else 1.0
    policy = PolicyModel(
        outline.model,
        outline.sources,
        temperature=temperature,
        chunk_rows=config.log_probs_chunk_size,
        keep_bytes=KEPT_BYTES if keep is None else int(keep * 2**30),
        gdn_backend=config.qwen_gdn_backend,
    )
    if config.use_routing_replay:
        policy.repeat_routing()
    return policy


def load_critic(config: Config, source: Start, dtype: torch.dtype) -> ValueModel:
    """A language model's body with a new value head."""
    outline = _outline(config, source, dtype)
    outline.put_value_head()
    return ValueModel(outline.model, outline.sources, gdn_backend=config.qwen_gdn_backend)


def _outline(config: Config, source: Start, dtype: torch.dtype) -> ModelOutline:
    """The model of a folder; that of --hf-checkpoint where the source is a checkpoint, of Megatron or not."""
    register_packed_attention()
    folder = source.hf_folder or Path(config.hf_checkpoint)
    return outline_causal_lm(
        folder,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=config.trust_remote_code,
        weights=None if source.megatron is None else read_in_place_of(folder, source.megatron),
    )
