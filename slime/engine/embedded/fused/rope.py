"""Rotary position embeddings: frequencies and cos/sin tables from the fields of a config.json.

Invariant: the tables equal those of transformers, rounded where it rounds them. An unsupported kind of scaling is
refused (`NotFused`), never guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime.storage.json_types import JsonMapping

_DEFAULT_THETA = 10_000.0


class NotFused(ValueError):
    """Raised for a model that the fused kernels do not support; the message is the reason."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding settings of a model."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # factor of cos and sin

    @classmethod
    def from_facts(cls, facts: JsonMapping) -> Rope:
        """Read the settings from a config, in transformers' older or newer field names."""
        given = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
        kind = given.get("rope_type") or given.get("type") or "default"
        theta = float(given.get("rope_theta") or facts.get("rope_theta") or _DEFAULT_THETA)
        if any(isinstance(value, dict) for value in given.values()):
            raise NotFused("its layers have different rotary frequencies")
        if float(given.get("partial_rotary_factor") or facts.get("partial_rotary_factor") or 1.0) != 1.0:
            raise NotFused("it rotates only a part of each head (partial_rotary_factor is not 1)")
        if kind == "default":
            return cls(kind, theta)
        if kind == "linear":
            return cls(kind, theta, factor=float(given["factor"]))
        original = facts.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        original = int(original or facts["max_position_embeddings"])
        if kind == "llama3":
            low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
            return cls(kind, theta, float(given["factor"]), low, high, original)
        if kind != "yarn":
            raise NotFused(f"its rope_type {kind!r} is not supported")
        factor = float(given.get("factor") or facts["max_position_embeddings"] / original)
        attention = given.get("attention_factor")
        if attention is None:
            scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")
            attention = _mscale(factor, 1.0)
            if scale and scale_all:
                attention = _mscale(factor, scale) / _mscale(factor, scale_all)
        return cls(
            "yarn",
            theta,
            factor=factor,
            original_positions=original,
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
            attention_factor=float(attention),
        )

    def frequencies(self, dim: int) -> torch.Tensor:
        """Return the rotary frequencies `[dim / 2]`, fp32."""
        steps = self.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        if self.kind == "linear":
            return 1.0 / steps / self.factor
        if self.kind == "llama3":  # long waves are stretched, short ones stay, those between are interpolated
            plain = 1.0 / steps
            longest, shortest = (self.original_positions / f for f in (self.low_freq_factor, self.high_freq_factor))
            wave = 2 * math.pi / plain
            scaled = torch.where(wave > longest, plain / self.factor, plain)
            smooth = (self.original_positions / wave - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            mixed = (1 - smooth) * scaled / self.factor + smooth * scaled
            return torch.where(~(wave < shortest) & ~(wave > longest), mixed, scaled)
        if self.kind == "yarn":
            # the indices of the frequencies between which the scaling ramps up
            low, high = (
                dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
                for turns in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            high = high + 0.001 if low == high else high
            ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
            unscaled = 1 - ramp
            return 1.0 / (self.factor * steps) * (1 - unscaled) + 1.0 / steps * unscaled
        return 1.0 / steps

    def tables(
        self, dim: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[positions, dim / 2]` in the model's dtype; on `meta`, empty tensors."""
        if device.type == "meta":
            cos, sin = torch.empty(2, positions, dim // 2, dtype=dtype, device=device).unbind(0)
            return cos, sin
        angles = torch.arange(positions, device=device).float()[:, None] * self.frequencies(dim).to(device)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
