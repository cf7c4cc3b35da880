"""A model in this process as a source of weights: exported by the code that trainer ranks run, as one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.models.delta.tensors import tensor_checksums
from slime.models.loading import as_in_folder
from slime.train.sending.delta import DeltaExporter, Published
from slime.train.sending.export import export_weights, hf_tensors, rollout_dtype
from slime.train.topology import Ranks, Topology

NamedTensor = tuple[str, torch.Tensor]


class OneRank:
    """What exporting asks of a backend, for a model that is not sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = SimpleNamespace(model=model)
        alone = Ranks(0, 1, torch.device("cpu"))
        self.topology = Topology(world=alone, data=alone, context=alone, model=alone)

    def local_parameters(self) -> Iterator[NamedTensor]:
        return ((name, parameter.detach()) for name, parameter in self.module.model.named_parameters())

    full_parameters = local_parameters

    def parameter_facts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.local_parameters()}

    def as_in_folder(self, members: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return as_in_folder(self.module.model, members)

    def gather_part(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return part


class ModelSource:
    """`step` changes a few elements of every tensor; `encoding` and `checksum` are those of its deltas."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, encoding: str = "xor", checksum: str = "xxh3-128") -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.backend: Any = OneRank(self.model)
        self.dtype = dtype
        self.published = Published(dtype)
        self.encoding, self.checksum = encoding, checksum
        self.exports: list[str] = []

    def step(self, seed: int, *, share: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < share
                parameter.add_(torch.randn(parameter.shape, generator=generator) * chosen * 0.1)

    def export_weights(self, out_dir: Path, version: int) -> list[Path]:
        self.exports.append(f"whole {version}")
        paths = export_weights(self.backend, out_dir, version=version, dtype=self.dtype, buffer_size=2**16)
        self.published.remember(self.backend, version)
        return paths

    def export_delta(self, out_dir: Path, version: int, base_version: int) -> list[dict[str, Any]]:
        self.exports.append(f"delta {version}")
        exporter = DeltaExporter(self.published, encoding=self.encoding, checksum=self.checksum)
        return [exporter.export(self.backend, out_dir, version=version, base_version=base_version).to_dict()]

    def weight_checksums(self) -> dict[str, str]:
        tensors = hf_tensors(self.backend)
        return tensor_checksums((name, t.to(rollout_dtype(t.dtype, self.dtype))) for name, t in tensors)
