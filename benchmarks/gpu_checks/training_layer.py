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
_NO_WORSE = 1.1  # times transformers' error in bfloat16, which rounds more often
Passes = tuple[Tensor, dict[str, Tensor]]


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
    wanted = passes(plain, row)
    name = f"{config.model_type}{'' if lora is None else ' with adapters'}"
    yield from _named(f"{name}, float32", errors(passes(fused, row), wanted), (1e-4, 1e-4))
    theirs, ours = (errors(passes(model.to(torch.bfloat16), row), wanted) for model in (plain, fused))
    yield from _named(
        f"{name}, bfloat16, beside transformers' own", ours, (_NO_WORSE * theirs[0], _NO_WORSE * theirs[1])
    )


def _named(name: str, found: tuple[float, float], bounds: tuple[float, float]) -> Iterator[tuple[str, float, float]]:
    yield f"log-probs, {name}", found[0], bounds[0]
    yield f"gradients, {name}, worst", found[1], bounds[1]


def errors(found: Passes, wanted: Passes) -> tuple[float, float]:
    """Of the log-probs in the mean, and of the gradient that is furthest off."""
    worst = max(apart(found[1][part], wanted[1][part]) for part in wanted[1])
    return (found[0] - wanted[0]).abs().mean().item(), worst


def passes(model: torch.nn.Module, row: object) -> Passes:
    model.zero_grad()
    log_probs, _ = PolicyModel(model)(row)  # type: ignore[arg-type]
    (log_probs * torch.linspace(-1, 1, len(log_probs), device=log_probs.device)).sum().backward()
    return log_probs.detach(), _copies(model)


def _copies(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients, which change with the model's precision."""
    parts = model.named_parameters()
    return {name: part.grad.to(torch.float32, copy=True) for name, part in parts if part.grad is not None}


def apart(found: Tensor, wanted: Tensor) -> float:
    """The length of the difference, of what is wanted."""
    return ((found - wanted).norm() / wanted.norm()).item()
