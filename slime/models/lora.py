"""LoRA targets: the linear layers that get an adapter, and the names and shapes of its matrices in the trainer.

    <module>.lora_A.weight  [rank, in]      <module>.lora_B.weight  [out, rank]

Invariant: nothing here imports torch, so a plan can refuse targets that do not exist.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError
from slime.models.shape import ModelShape, tensor_shapes

ALL_LINEAR = "all-linear"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
LinearShapes = Mapping[str, tuple[int, int]]
"""Linear layers by module name, each with its (out, in) features."""

_IN_A_LAYER = re.compile(r"\.\d+\.")
_EXPERTS = re.compile(r"\.experts\b")
_ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class Lora:
    """Hyperparameters of a LoRA adapter."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / self.rank


def is_adapter(parameter: str) -> bool:
    return parameter.endswith((LORA_A, LORA_B))


def is_of_expert(name: str) -> bool:
    """True if a module or parameter belongs to a routed expert, which gets no adapter."""
    return _EXPERTS.search(name) is not None


def adapter_shapes(modules: LinearShapes, rank: int) -> dict[str, tuple[int, int]]:
    """The parameters of an adapter on these linear layers, by their names in the trainer."""
    shapes = {}
    for module, (rows, columns) in modules.items():
        shapes[module + LORA_A] = (rank, columns)
        shapes[module + LORA_B] = (rows, rank)
    return shapes


def choose_targets(
    linears: Collection[str],
    targets: Sequence[str],
    where: str,
    *,
    freeze: Sequence[str] | None = None,
    only_train: Sequence[str] | None = None,
) -> list[str]:
    """The linear layers that `targets` name, in the model's order; UserError for a target that names none.

    `linears` are the layers that can have an adapter, without the output layer. A layer that the patterns of `freeze`
    and `only_train` exclude from training gets no adapter.
    """
    for target in targets:
        if target != ALL_LINEAR and not any(_matches_target(target, module) for module in linears):
            there = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in linears)) or "none"
            raise UserError(
                f"--lora-target-modules {target}: {where} has no linear layer of that name; {there} can have an "
                "adapter (embedding, output layer, routers and experts have none), or give all-linear"
            )
    if not linears:
        raise UserError(f"--lora-rank: {where} has no linear layer that could have an adapter: leave it out")
    named = [module for module in linears if any(_matches_target(target, module) for target in targets)]
    chosen = [
        module
        for module in named
        if not any(re.search(pattern, f"{module}.weight") for pattern in freeze or ())
        and (not only_train or any(re.search(pattern, f"{module}.weight") for pattern in only_train))
    ]
    if not chosen:
        flag = "--only-train-params-name-list" if only_train else "--freeze-params-name-list"
        raise UserError(f"{flag} leaves none of the layers that --lora-target-modules names: drop one of the two")
    return chosen


def _matches_target(target: str, module: str) -> bool:
    return target == ALL_LINEAR or module == target or module.endswith(f".{target}")


def linears_of(folder: str | Path) -> dict[str, tuple[int, int]]:
    """The linear layers of a model folder that can have an adapter, by the headers of its weight files.

    These are the matrices within layers, without routers and experts (which the trainer has fused). A folder without
    weight files is described by its config.json, for families of plain layers; empty if that is not possible.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        shapes |= tensor_shapes(file)
    beside_experts = {_EXPERTS.split(name)[0] for name in shapes if is_of_expert(name)}
    found: dict[str, tuple[int, int]] = {}
    for name in shapes:
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if kind != "weight" or len(shapes[name]) != 2 or not _IN_A_LAYER.search(f"{module}."):
            continue
        if is_of_expert(module) or (last in _ROUTERS and parent in beside_experts):
            continue
        found[module] = (shapes[name][0], shapes[name][1])
    return found or _linears_of_shape(ModelShape.from_folder(folder))


def _linears_of_shape(shape: ModelShape) -> dict[str, tuple[int, int]]:
    hidden, ffn, layers = shape.hidden_size, shape.ffn_size, shape.num_layers
    heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if hidden is None or ffn is None or layers is None or heads is None or kv_heads is None or width is None:
        return {}
    mixed = shape.shared_expert_ffn_size or 0 < shape.num_moe_layers < layers or shape.num_attention_layers != layers
    if mixed or shape.is_latent or shape.counted_parameters is None or shape.model_type == "phi3":
        return {}
    attention = {"q": (heads * width, hidden), "k": (kv_heads * width, hidden)}
    attention |= {"v": attention["k"], "o": (hidden, heads * width)}
    dense = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    found = {}
    for layer in range(layers):
        for name, size in attention.items():
            found[f"model.layers.{layer}.self_attn.{name}_proj"] = size
        if not shape.num_moe_layers:
            for name, size in dense.items():
                found[f"model.layers.{layer}.mlp.{name}_proj"] = size
    return found


def peft_targets(modules: Iterable[str], linears: Collection[str]) -> list[str]:
    """`target_modules` for PEFT: last name components if these match exactly `modules`, else whole names.

    `linears` are all linear layers of the model and its experts: for models with experts PEFT splits some names.
    """
    modules = list(modules)
    last = sorted({module.rpartition(".")[2] for module in modules})
    meant = {module for module in linears if module.rpartition(".")[2] in last}
    plain = meant == set(modules) and not any(map(is_of_expert, linears))
    return last if plain else modules
