"""Global names of parameters: those that the whole model has, however it is cut.

Invariant: a parameter has the same name in every layout. Layers are numbered over all stages and experts over all
expert-parallel ranks, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
Named = TypeVar("Named", bound=Tensor)


def global_names(stages: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter of this process's stages."""
    return {
        name: parameter
        for stage in map(unwrapped, stages)
        for name, parameter in _globally(stage, stage.named_parameters())
    }


def global_buffers(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """What belongs to the weights and is not trained: the biases that routers choose experts with."""
    return {
        name: buffer
        for stage in map(unwrapped, stages)
        for name, buffer in _globally(stage, stage.named_buffers())
        if name.endswith(".mlp.router.expert_bias")
    }


def unwrapped(stage: nn.Module) -> nn.Module:
    """The model inside what adds up its gradients or converts its inputs."""
    while isinstance(inner := stage._modules.get("module"), nn.Module):
        stage = inner
    return stage


def _globally(stage: nn.Module, named: Iterator[tuple[str, Named]]) -> Iterator[tuple[str, Named]]:
    for name, value in named:
        found = _LAYER.match(name)
        if found is None:
            yield name, value
            continue
        layer: Any = stage.get_submodule(f"decoder.layers.{found[1]}")
        own = f"decoder.layers.{layer.layer_number - 1}.{name[found.end() :]}"
        if (expert := _EXPERT.search(own)) is not None:
            number = layer.mlp.local_expert_indices[int(expert[2])]
            own = f"{own[: expert.start()]}{expert[1]}{number}"
        yield own, value
