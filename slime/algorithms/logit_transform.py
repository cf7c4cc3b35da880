"""The transform of logits between the projection and the softmax: scale, soft cap, temperature."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """Computes z from the raw projection: v = softcap * tanh(scale * raw / softcap), z = v / temperature."""

    scale: float
    softcap: float | None
    temperature: float

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform logits in place."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits.mul_(factor)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """Compute dz / d(raw projection) from z."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1.0 - (z * (self.temperature / self.softcap)).square_()).mul_(factor)
