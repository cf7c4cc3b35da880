"""LoRA in the trainer: linear layers with a frozen weight and two small matrices that are trained.

Invariant: a layer with an adapter keeps its own parameters under their own names (`<module>.weight`), so loading,
sharding and saving the frozen model are as without one; the matrices are `<module>.lora_A.weight` and
`<module>.lora_B.weight`, float32. Their initial values depend on the seed, not on the number of ranks.
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
from slime.models.lora import LORA_A, LORA_B, Lora, adapter_shapes, choose_targets, is_of_expert
from slime.models.peft_adapter import BadAdapter, read_adapter


@dataclass
class AdapterSwitch:
    """Switch of a model's adapters, shared by its layers."""

    on: bool = True


class LoraLinear(nn.Linear):
    """Linear layer `x W^T + b + scale * x A^T B^T`, without the last term while the switch is off."""

    def __init__(self, linear: nn.Linear, lora: Lora, switch: AdapterSwitch) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: it would create a weight, and the layer's own is used
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, device=device, dtype=torch.float32)
        self.scale = lora.scale
        self.switch = switch

    @property
    def matrices(self) -> tuple[Tensor, Tensor] | None:
        """A and B; None while the adapter is switched off."""
        return (self.lora_A.weight, self.lora_B.weight) if self.switch.on else None

    def forward(self, states: Tensor) -> Tensor:
        output = functional.linear(states, self.weight, self.bias)
        if (matrices := self.matrices) is None:
            return output
        a, b = matrices
        low = functional.linear(states, a).flatten(0, -2)
        return torch.addmm(output.flatten(0, -2), low, b.t(), alpha=self.scale).view_as(output)


class LoraLayers:
    """The adapter of one model: its layers, their initial values, and its switch."""

    def __init__(
        self, lora: Lora, modules: dict[str, tuple[int, int]], linears: list[str], switch: AdapterSwitch
    ) -> None:
        self.lora = lora
        self.modules = modules
        self.linears = linears
        """All linear layers of the model, and its experts: modules that PEFT could match with a target's name."""
        self._switch = switch

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of the adapter's parameters."""
        return adapter_shapes(self.modules, self.lora.rank)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapter off inside the context: the model is then the base model."""
        before, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._switch.on = before

    def start_values(self, seed: int, folder: str | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the initial values: those of the adapter in `folder`, or of a new one."""
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
            raise UserError(f"--lora-load {folder} {what} the targets name: it belongs to another model")
        for module, (a, b) in found.pairs.items():
            if (len(b), a.shape[1]) != self.modules[module]:
                raise UserError(
                    f"--lora-load {folder} is for {module} of {(len(b), a.shape[1])}, which is {self.modules[module]} "
                    "here: it belongs to another model"
                )
            yield module + LORA_A, a
            yield module + LORA_B, b

    def first_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of a new adapter: A drawn as in PEFT, B zero.

        Each name has its own generator, so neither the order nor the number of ranks matters.
        """
        for name, shape in self.shapes.items():
            if name.endswith(LORA_B):
                yield name, torch.zeros(shape)
                continue
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            bound = 1.0 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)


def lora_of(config: Config) -> Lora | None:
    """Read the LoRA hyperparameters from the flags; None without `--lora-rank`."""
    if not config.lora_rank:
        return None
    alpha = 2.0 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    return Lora(config.lora_rank, alpha, tuple(config.lora_target_modules or ("all-linear",)))


def put_adapter(
    model: PreTrainedModel, lora: Lora, *, freeze: list[str] | None, only_train: list[str] | None
) -> LoraLayers:
    """Freeze the model and add an adapter to its targets; the matrices have no values yet.

    A layer whose weight is frozen by `--freeze-params-name-list` or `--only-train-params-name-list` gets none. It also
    works on the meta device.
    """
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    able = [name for name, module in linears.items() if module is not head and not is_of_expert(name)]
    chosen = choose_targets(able, lora.targets, type(model).__name__, freeze=freeze, only_train=only_train)
    switch = AdapterSwitch()
    for name in chosen:
        model.set_submodule(name, LoraLinear(linears[name], lora, switch))
    modules = {name: (linears[name].out_features, linears[name].in_features) for name in chosen}
    experts = [name for name, _ in model.named_parameters() if is_of_expert(name)]
    return LoraLayers(lora, modules, [*linears, *experts], switch)
