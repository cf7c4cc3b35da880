"""LoRA in the trainer: linear layers with a frozen weight and two small matrices that are trained.

Invariant: a layer that has an adapter keeps its own parameters under their own names (`<module>.weight`), so loading,
sharding and saving the frozen model are as without one; the matrices are `<module>.lora_A.weight` and
`<module>.lora_B.weight`, float32. They start the same for a seed, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from slime.config import Config
from slime.errors import UserError
from slime.models.heads import output_projection
from slime.models.lora import LORA_A, LORA_B, Lora, adapter_shapes, choose_targets, is_of_expert
from slime.models.peft_adapter import BadAdapter, read_adapter


@dataclass
class Switch:
    """Whether the adapters of a model take part."""

    on: bool = True


class LoraLinear(nn.Linear):
    """`x W^T + b + scale * x A^T B^T`, and without the last term while the switch is off."""

    def __init__(self, linear: nn.Linear, lora: Lora, switch: Switch) -> None:
        nn.Module.__init__(self)  # the weight is the layer's own: none is made
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, device=device, dtype=torch.float32)
        self.scale = lora.scale
        self.switch = switch

    @property
    def matrices(self) -> tuple[Tensor, Tensor] | None:
        """A and B, while they take part."""
        return (self.lora_A.weight, self.lora_B.weight) if self.switch.on else None

    def forward(self, states: Tensor) -> Tensor:
        output = functional.linear(states, self.weight, self.bias)
        if (matrices := self.matrices) is None:
            return output
        a, b = matrices
        low = functional.linear(states, a).flatten(0, -2)
        return torch.addmm(output.flatten(0, -2), low, b.t(), alpha=self.scale).view_as(output)


class LoraLayers:
    """The adapter of one model: what it is on, and whether it takes part."""

    def __init__(self, lora: Lora, modules: dict[str, tuple[int, int]], linears: list[str], switch: Switch) -> None:
        self.lora = lora
        self.modules = modules
        self.linears = linears
        """All linear layers of the model, and its experts: what PEFT could take a target's name for."""
        self._switch = switch

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The parameters of the adapter."""
        return adapter_shapes(self.modules, self.lora.rank)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model is the one it started as."""
        before, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._switch.on = before

    def start_values(self, seed: int, folder: str | None) -> Iterator[tuple[str, Tensor]]:
        """What a run begins with: the adapter in a folder, or a new one."""
        if folder is None:
            yield from self.first_values(seed)
            return
        try:
            found = read_adapter(Path(folder))
        except BadAdapter as cause:
            raise UserError(f"--lora-load: {cause}") from cause
        absent, more = self.modules.keys() - found.pairs.keys(), found.pairs.keys() - self.modules.keys()
        if absent or more:
            what = f"lacks {min(absent)}, which" if absent else f"has {min(more)}, which none of"
            raise UserError(f"--lora-load {folder} {what} the targets name: it is of another model")
        for module, (a, b) in found.pairs.items():
            if (len(b), a.shape[1]) != self.modules[module]:
                raise UserError(
                    f"--lora-load {folder} is for {module} of {(len(b), a.shape[1])}, which is {self.modules[module]} "
                    "here: it is of another model"
                )
            yield module + LORA_A, a
            yield module + LORA_B, b

    def first_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """A as PEFT draws it, B zero. A generator for each name: neither the order nor the number of ranks matters."""
        for name, shape in self.shapes.items():
            if name.endswith(LORA_B):
                yield name, torch.zeros(shape)
                continue
            generator = torch.Generator().manual_seed(_seed_of(name, seed))
            bound = 1.0 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)


def lora_of(config: Config) -> Lora | None:
    """What the flags ask for."""
    if not config.lora_rank:
        return None
    alpha = 2.0 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    return Lora(config.lora_rank, alpha, tuple(config.lora_target_modules or ("all-linear",)))


def put_adapter(
    model: PreTrainedModel, lora: Lora, *, freeze: list[str] | None, only_train: list[str] | None
) -> LoraLayers:
    """Freeze the model and give its targets an adapter; the matrices have no values yet.

    A layer whose weight would not be trained otherwise (`--freeze-params-name-list`, `--only-train-params-name-list`)
    gets none. Works on the meta device too.
    """
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    able = [name for name, module in linears.items() if module is not head and not is_of_expert(name)]
    chosen = choose_targets(able, lora.targets, type(model).__name__, freeze=freeze, only_train=only_train)
    switch = Switch()
    for name in chosen:
        model.set_submodule(name, LoraLinear(linears[name], lora, switch))
    modules = {name: (linears[name].out_features, linears[name].in_features) for name in chosen}
    experts = [name for name, _ in model.named_parameters() if is_of_expert(name)]
    return LoraLayers(lora, modules, [*linears, *experts], switch)


def train_head(model: PreTrainedModel) -> None:
    """A critic's head is new, so it is trained whole: float32, as all that is trained."""
    output_projection(model).float().requires_grad_(True)


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big")
