"""Numbers on their way from the device to the host, while the device goes on.

Invariant: `wait` waits for what was sent before it and for nothing that was launched since the last of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Arrivals:
    """On a CPU everything has arrived."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def send(self, tensor: Tensor) -> Tensor:
        """Where it will be, in float32; to be read after `wait`."""
        if not tensor.is_cuda:
            return tensor.float()
        host = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        self._last = torch.cuda.Event()
        self._last.record()
        return host

    def wait(self) -> None:
        if self._last is not None:
            self._last.synchronize()
