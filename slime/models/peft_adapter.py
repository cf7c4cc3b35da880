"""Reads, writes and merges LoRA adapters in PEFT's format.

    adapter_config.json         r, lora_alpha, target_modules and the other fields of PEFT
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in] and .lora_B.weight [out, r], float32;
                                `__metadata__`: base_dtype, the dtype of the base weights in training

Invariant: A and B are merged into a weight by `merged` alone. Trainers and engines call it with the same numbers, so
the weights that sampling and training use are bitwise equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime.storage.files import fsync_path
from slime.storage.json_types import JsonMapping, JsonObject

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
_BASE_DTYPE = "base_dtype"
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.bfloat16, torch.float16)}
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        ("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias", "modules_to_save", "rank_pattern",
         "alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices",
         "alora_invocation_tokens"),
        (None, False, [], {}),
    ),
}  # fmt: skip
"""The supported values of config fields: other values define a computation that `merged` does not do."""


class BadAdapter(ValueError):
    """A folder or a set of tensors that is not a LoRA adapter, or one of an unsupported kind."""


@dataclass(frozen=True)
class AdapterConfig:
    """The parameters of an adapter in addition to A and B."""

    rank: int
    alpha: float
    base_dtype: torch.dtype | None = None
    """The dtype of the base weights before the adapter is added; None: the dtype in which they were loaded."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def to_dict(self) -> JsonObject:
        return {"r": self.rank, "lora_alpha": self.alpha, _BASE_DTYPE: _dtype_name(self.base_dtype)}

    @classmethod
    def from_dict(cls, given: JsonMapping) -> AdapterConfig:
        """Read `r`, `lora_alpha` and `base_dtype` from a PEFT config or a message."""
        rank, alpha, kind = given.get("r"), given.get("lora_alpha"), given.get(_BASE_DTYPE)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < 1 << 16:
            raise BadAdapter(f"r must be an integer above 0, not {rank!r}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
            raise BadAdapter(f"lora_alpha must be a number, not {alpha!r}")
        if kind is not None and kind not in _DTYPES:
            raise BadAdapter(f"base_dtype must be one of {', '.join(_DTYPES)}, not {kind!r}")
        return cls(rank, float(alpha), None if kind is None else _DTYPES[kind])


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the matrices A and B by module."""

    facts: AdapterConfig
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)

    @classmethod
    def from_tensors(cls, facts: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> Adapter:
        """Pair each module's A and B by their names; BadAdapter for an incomplete pair or shapes that do not fit."""
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            module, half = split_tensor_name(name)
            halves.setdefault(module, {})[half] = tensor
        if not halves:
            raise BadAdapter("the adapter has no tensors")
        for module, pair in halves.items():
            if len(pair) != 2:
                there, missing = ("A", "B") if "A" in pair else ("B", "A")
                raise BadAdapter(f"the adapter has lora_{there} and no lora_{missing} for {module}")
            a, b = pair["A"], pair["B"]
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != facts.rank or b.shape[1] != facts.rank:
                raise BadAdapter(
                    f"{module} has A {tuple(a.shape)} and B {tuple(b.shape)}, which is not a pair of rank {facts.rank}"
                )
        return cls(facts, {module: (pair["A"], pair["B"]) for module, pair in halves.items()})

    @property
    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        """The weights that the adapter changes, by their names in the model, with the shapes that they must have."""
        return {f"{module}.weight": (b.shape[0], a.shape[1]) for module, (a, b) in self.pairs.items()}

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())


def peft_name(parameter: str) -> str:
    """The name under which a trainer's parameter (`<module>.lora_A.weight`) is sent and saved."""
    return _PREFIX + parameter


def tensor_names(module: str) -> tuple[str, str]:
    """The names under which a module's A and B are sent and saved."""
    return f"{_PREFIX}{module}{_SUFFIXES['A']}", f"{_PREFIX}{module}{_SUFFIXES['B']}"


def split_tensor_name(name: str) -> tuple[str, str]:
    """The module that an adapter's tensor belongs to, and `A` or `B`."""
    for half, end in _SUFFIXES.items():
        if name.startswith(_PREFIX) and name.endswith(end):
            return name[len(_PREFIX) : -len(end)], half
    raise BadAdapter(f"{name!r} is not a LoRA tensor: expected {_PREFIX}<module>{_SUFFIXES['A']} or {_SUFFIXES['B']}")


@torch.no_grad()
def merge_lora(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """`base + scale * B @ A`, computed in float32 and rounded to `dtype` once."""
    return (b.float() @ a.float()).mul_(scale).add_(base).to(dtype)


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    facts: AdapterConfig,
    *,
    base_model: str,
    target_modules: Sequence[str],
    sync: bool = True,
) -> list[Path]:
    """Write the two files of an adapter, the config last; `target_modules` are names or name suffixes, as in PEFT."""
    folder.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt"}
    if facts.base_dtype is not None:
        metadata[_BASE_DTYPE] = str(_dtype_name(facts.base_dtype))
    paths = [folder / TENSORS_NAME, folder / CONFIG_NAME]
    save_file(ready, paths[0], metadata=metadata)
    alpha = int(facts.alpha) if facts.alpha == int(facts.alpha) else facts.alpha
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": facts.rank,
              "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": list(target_modules), "bias": "none",
              "fan_in_fan_out": False, "inference_mode": True}  # fmt: skip
    paths[1].write_text(json.dumps(config, indent=2) + "\n")
    if sync:
        for path in (*paths, folder):
            fsync_path(path)
    return paths


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter of a folder onto the CPU; `BadAdapter` if it is invalid."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_text())
        if not isinstance(config, dict):
            raise BadAdapter(f"{folder / CONFIG_NAME} does not hold a JSON object")
        with safe_open(folder / TENSORS_NAME, framework="pt") as file:
            base = {_BASE_DTYPE: (file.metadata() or {}).get(_BASE_DTYPE)}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as cause:
        raise BadAdapter(f"{folder} holds no readable LoRA adapter: {cause}") from cause
    for name, plain in _SUPPORTED_VALUES.items():
        if name in config and config[name] not in plain:
            raise BadAdapter(f"{folder / CONFIG_NAME} has {name} {config[name]!r}: only plain LoRA is supported")
    try:
        return Adapter.from_tensors(AdapterConfig.from_dict({**config, **base}), tensors)
    except BadAdapter as cause:
        raise BadAdapter(f"{folder}: {cause}") from cause


def _dtype_name(kind: torch.dtype | None) -> str | None:
    return None if kind is None else str(kind).removeprefix("torch.")
