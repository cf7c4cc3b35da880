"""An in-process model as a weight source, exported by the code of the trainer ranks with one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.models.delta.apply import tensor_checksums
from slime.models.loading import split_fused_weights
from slime.train.backends.fsdp.hf_export import HfExport
from slime.train.timers import RankProgress
from slime.train.weight_export.delta import PublishedWeights, export_delta
from slime.train.weight_export.files import export_weights
from tests.weights.conftest import LocalSource

BUFFER_SIZE = 2**16


class OneRank:
    """The backend interface that exporting needs, for a model that is not sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.progress = RankProgress()
        self.topology = SimpleNamespace(world=SimpleNamespace(rank=0, union=set), device=torch.device("cpu"))
        split = partial(split_fused_weights, model)
        self.export = HfExport(dict(model.named_parameters()), split, rank=0, world_size=1)


class OneActor:
    """The policy of a trainer with one rank, as far as exporting needs it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.backend = OneRank(model)
        self.exported: list[int] = []

    def remember_exported(self, version: int) -> None:
        self.exported.append(version)


class ModelSource(LocalSource):
    """A weight source; `step` changes a few elements of every tensor.

    `encoding` and `checksum` are those of its deltas.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, *, encoding: str = "xor", checksum: str = "xxh3-128") -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.backend: Any = OneRank(self.model)
        self.dtype = dtype
        self.published = PublishedWeights()
        self.encoding, self.checksum = encoding, checksum
        self.exports: list[str] = []

    def step(self, seed: int, *, share: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < share
                parameter.add_(torch.randn(parameter.shape, generator=generator) * chosen * 0.1)

    def export_weights(self, out_dir: str, version: int) -> list[str]:
        self.exports.append(f"whole {version}")
        self.published.version = None
        how = {"dtype": self.dtype, "buffer_size": BUFFER_SIZE, "keep": self.published.keep}
        paths = export_weights(self.backend, Path(out_dir), version=version, **how)
        self.published.version = version
        return [str(path) for path in paths]

    def export_delta(self, out_dir: str, version: int, base_version: int) -> dict[str, Any]:
        self.exports.append(f"delta {version}")
        how: dict[str, Any] = {
            "dtype": self.dtype,
            "buffer_size": BUFFER_SIZE,
            "encoding": self.encoding,
            "checksum": self.checksum,
        }
        how |= {"version": version, "base_version": base_version}
        return export_delta(self.backend, self.published, Path(out_dir), **how).to_dict()

    def weight_checksums(self) -> dict[str, str]:
        buckets = self.backend.export.buckets(self.backend.export.plan(self.dtype, BUFFER_SIZE))
        return tensor_checksums(pair for bucket in buckets for pair in bucket.tensors.items())
