"""A cluster that a plan is made for and that is not here: `--plan-cluster 8x8x80`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WRITTEN = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True)
class PlannedCluster:
    nodes: int
    gpus_per_node: int
    gpu_memory: int
    """Bytes."""

    @classmethod
    def parse(cls, text: str) -> PlannedCluster:
        """Nodes, GPUs of each, and GiB of each GPU, with an x between them."""
        match = _WRITTEN.fullmatch(text)
        assert match is not None, "checked when the flags were"
        nodes, gpus, gib = map(int, match.groups())
        return cls(nodes, gpus, gib * 2**30)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} GPUs of {self.gpu_memory // 2**30} GiB"


def cluster_complaint(text: str) -> str | None:
    """What is wrong with the value of --plan-cluster."""
    return None if _WRITTEN.fullmatch(text) else "is nodes, GPUs of each and GiB of each GPU, such as 8x8x80"
