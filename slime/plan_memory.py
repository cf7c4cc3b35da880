"""How much memory each kind of process will take, estimated from shapes alone.

Weights, gradients, optimizer states and the KV cache are exact for a known shape; activations are rough.
"""

from __future__ import annotations

import dataclasses

from slime.cluster.precision import resolve_dtype
from slime.config import Config
from slime.config.algorithm import has_critic, needs_reference
from slime.config.asynchronous import versions_behind
from slime.config.groups.rollout import DEFAULT_RESPONSE_LEN
from slime.models.shape import BYTES_PER_ELEMENT, ModelShape

_LOGIT_ROWS = 2048
_CPU_KV_LIMIT = 2 * 2**30
_SFT_GUESS = 1024


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose of one process; purposes whose size is unknown are left out."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def trainer_memory(config: Config, shape: ModelShape, *, device: str, trainers: int) -> MemoryEstimate:
    """One training process: fp32 master weights, gradients and two Adam moments are sharded over all of them."""
    parts: dict[str, int] = {}
    dtype = resolve_dtype(config.dtype, device, shape.num_parameters)
    if shape.num_parameters is not None:
        shard = -(-shape.num_parameters // trainers)
        parts = {"weights": 4 * shard, "gradients": 4 * shard, "Adam moments": 8 * shard}
        frozen = BYTES_PER_ELEMENT[dtype] * shard
        if has_critic(config):
            parts["critic with its optimizer"] = 16 * shard
        if needs_reference(config):
            parts["reference"] = frozen
        if config.keep_old_actor:
            behind = versions_behind(config)
            on_host = behind + 1 if behind and device != "cuda" else 0  # older versions wait in the host's memory
            parts["old policy"] = frozen * (1 + on_host)
        if config.use_opd and config.opd_type == "trainer":
            parts["teacher (if it is as large)"] = frozen
    tokens = tokens_per_forward(config)
    if shape.vocab_size is not None:
        rows = config.log_probs_chunk_size if config.log_probs_chunk_size > 0 else _LOGIT_ROWS
        parts["logits"] = 2 * 4 * min(rows, tokens) * shape.vocab_size
    if shape.num_layers is not None and shape.hidden_size is not None:
        layer = 8 * shape.hidden_size + 3 * (shape.ffn_size or 4 * shape.hidden_size)
        kept = (
            shape.num_layers * shape.hidden_size + layer if config.recompute_activations else shape.num_layers * layer
        )
        parts["activations (rough)"] = tokens * kept * BYTES_PER_ELEMENT[dtype]
    return MemoryEstimate(parts)


def engine_memory(
    config: Config, shape: ModelShape, *, dtype: str, device: str, available: int | None
) -> MemoryEstimate:
    """One embedded engine: weights in the rollout precision `dtype` and the KV cache."""
    parts: dict[str, int] = {}
    if shape.num_parameters is not None:
        parts["weights"] = BYTES_PER_ELEMENT[dtype] * shape.num_parameters
    per_token = shape.kv_bytes_per_token(dtype)
    if config.engine_max_total_tokens is not None and per_token is not None:
        parts["KV cache"] = config.engine_max_total_tokens * per_token
    elif available is not None:
        free = max(available - parts.get("weights", 0), 0) if device == "cuda" else available
        budget = int(free * config.engine_mem_fraction)
        parts["KV cache (at most)"] = budget if device == "cuda" else min(budget, _CPU_KV_LIMIT)
    return MemoryEstimate(parts)


def tokens_per_forward(config: Config) -> int:
    """Tokens of one training forward pass at most."""
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is not None:
        return config.max_tokens_per_gpu
    return config.micro_batch_size * longest_sample(config)


def longest_sample(config: Config) -> int:
    """Tokens of prompt and response together, as far as the flags bound them."""
    if config.rollout_max_context_len is not None:
        return config.rollout_max_context_len
    sampled = None if config.loss_type == "sft_loss" else DEFAULT_RESPONSE_LEN
    bounds = [config.rollout_max_prompt_len, config.rollout_max_response_len or sampled]
    return sum(bound for bound in bounds if bound is not None) or _SFT_GUESS


def available_memory() -> int | None:
    """Bytes of main memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            fields = dict(line.split(":", 1) for line in stream)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
