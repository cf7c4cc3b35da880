"""Fused decoder layers in training, LoRA too: log-probs and gradients against transformers' layers in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from slime.models.lora import Lora
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.fused.layer import fuse_layers
from slime.train.backends.fsdp.lora import put_adapter
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.samples.packing import pack

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "intermediate_size": 1100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_LENGTHS = (300, 7, 129)


def checks() -> Iterator[tuple[str, float, float]]:
    for config in (Qwen3Config(**SIZES, head_dim=128), LlamaConfig(**SIZES, head_dim=64), Qwen2Config(**SIZES)):
        yield from _one(config)
        yield from _one(config, Lora(16, 24.0))


def _one(config: PretrainedConfig, lora: Lora | None = None) -> Iterator[tuple[str, float, float]]:
    register_packed_attention()
    torch.manual_seed(0)
    device = torch.device("cuda")
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME).to(device)
    if lora is not None:
        put_adapter(plain, lora, freeze=None, only_train=None)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.02))
            parameter.copy_(parameter.bfloat16())
    fused = copy.deepcopy(plain)
    fuse_layers(fused)
    tokens = [torch.randint(0, 1000, (length,)).numpy() for length in _LENGTHS]
    row = pack(tokens, [length - 2 for length in _LENGTHS], device)
    wanted_values, wanted = passes(plain, row)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        values, found = passes(fused.to(dtype), row)
        name = f"{config.model_type}{'' if lora is None else ' with adapters'}, {str(dtype).removeprefix('torch.')}"
        yield f"log-probs, {name}", (values - wanted_values).abs().mean().item(), bound
        yield f"gradients, {name}, worst", max(apart(found[part], wanted[part]) for part in wanted), bound
        for parameter in fused.parameters():
            parameter.grad = None


def passes(model: torch.nn.Module, row: object) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, _ = PolicyModel(model)(row)  # type: ignore[arg-type]
    (log_probs * torch.linspace(-1, 1, len(log_probs), device=log_probs.device)).sum().backward()
    return log_probs.detach(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: Tensor, wanted: Tensor) -> float:
    """The length of the difference, of what is wanted."""
    return ((found - wanted).norm() / wanted.norm()).item()
