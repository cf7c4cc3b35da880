"""What happens to logits between the projection and the softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """What happens between the raw projection and the softmax."""

    scale: float
    softcap: float | None
    temperature: float

    def apply_(self, logits: Tensor) -> Tensor:
        if self.softcap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits.mul_(factor)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """dz / d(raw projection), from z itself."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1.0 - (z * (self.temperature / self.softcap)).square_()).mul_(factor)
