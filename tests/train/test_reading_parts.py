"""Tests that every rank reads only its own part of the weights, bitwise equal to what transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.config.initial_weights import InitialWeights
from slime.models.families.tp_sharding import region_shape
from slime.models.loading import load_causal_lm
from slime.models.safetensors_io import StoredTensor
from slime.train.backends.fsdp.builder import FSDPBuilder
from slime.train.backends.fsdp.sharding import local_part, local_region
from slime.train.timers import RankProgress
from slime.train.topology import Ranks
from tests.peers import together
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
FAMILIES = ("qwen3", "gpt_oss", "qwen3_moe")
"""Covers tied weights; a separate output layer, biases and sinks; experts fused and not fused in the folder."""


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_causal_lm(folder, dtype=dtype, device="cpu", attn_implementation="eager")


def assert_parts(model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert list(parameters) == list(expected)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        part, region = local_part(parameter.detach()), local_region(parameter)
        assert part.shape == region_shape(region)
        assert part.dtype == expected[name].dtype
        assert torch.equal(part, expected[name][region]), name


def read_everything(ranks: Ranks, folders: dict[str, Path], out: Path) -> dict[str, tuple[int, list[str]]]:
    """Return, for each model, the bytes that this rank read for its policy and its progress reports."""
    answer = {}
    for family, folder in folders.items():
        count, told = [0], list[str]()
        real = StoredTensor._bytes

        def counting(stored: StoredTensor, begin: int, size: int) -> torch.Tensor:
            count[0] += size  # noqa: B023  (called before the next one is made)
            return real(stored, begin, size)  # noqa: B023

        StoredTensor._bytes = counting  # type: ignore[method-assign]
        config = config_for(folder, out, actor_num_gpus_per_node=ranks.size)
        progress = RankProgress(told.append, between_s=0)
        builder = FSDPBuilder(config, ranks, compute_dtype=torch.bfloat16, progress=progress)
        backend = builder.policy(config, InitialWeights())
        answer[family] = (count[0], list(told))
        StoredTensor._bytes = real  # type: ignore[method-assign]
        expected = whole_model(folder)
        assert_parts(backend.module.model, dict(expected.named_parameters()))
        head, embedding = backend.module.model.lm_head, backend.module.model.get_input_embeddings()
        assert (head.weight is embedding.weight) == (expected.lm_head.weight is expected.get_input_embeddings().weight)
        for name, buffer in expected.named_buffers():
            assert torch.equal(dict(backend.module.model.named_buffers())[name], buffer)
        backend.frozen.load("ref", InitialWeights())
        frozen = backend.frozen.model("ref").model.model
        assert_parts(frozen, dict(whole_model(folder, torch.bfloat16).named_parameters()))
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        critic = builder.critic(config, InitialWeights()).module.model
        values = dict(expected.named_parameters()) | {"lm_head.weight": torch.zeros(1, 64)}
        assert_parts(critic, {name: values[name] for name, _ in critic.named_parameters()})
    return answer


def test_three_ranks_read_each_weight_once_in_total(model_folder: Folder, tmp_path: Path) -> None:
    """Neither 128 and 64 rows nor four experts are divisible by three."""
    folders = {family: model_folder(family) for family in FAMILIES}
    ranks = together(3, read_everything, folders, tmp_path, folder=tmp_path)
    for family, folder in folders.items():
        model = whole_model(folder)
        assert sum(read[family][0] for read in ranks) == sum(p.nbytes for p in model.parameters())
        count = len(list(model.parameters()))
        for read in ranks:
            assert read[family][1][-1] == f"reading weights: tensor {count} of {count}"


def from_checkpoint(ranks: Ranks, folder: Path, checkpoint: Path, out: Path) -> None:
    config = config_for(folder, out, actor_num_gpus_per_node=ranks.size)
    builder = FSDPBuilder(config, ranks, compute_dtype=torch.bfloat16, progress=RankProgress())
    backend = builder.policy(config, InitialWeights(checkpoint=checkpoint, flag="--ref-load"))
    backend.frozen.load("ref", InitialWeights(checkpoint=checkpoint, flag="--ref-load"))
    expected: dict[str, Any] = torch.load(out / "expected")
    assert_parts(backend.module.model, expected)
    frozen = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_parts(backend.frozen.model("ref").model.model, frozen)


def test_three_ranks_load_their_parts_of_a_checkpoint(model_folder: Folder, tmp_path: Path) -> None:
    trained = InProcess(config_for(model_folder("qwen3_moe"), tmp_path, save=str(tmp_path / "saved")))
    trained.train(0, make_samples(3, 3))
    trained.trainer.save(0)
    torch.save(trained.weights, tmp_path / "expected")
    checkpoint = tmp_path / "saved" / "iter_0000000"
    together(3, from_checkpoint, model_folder("qwen3_moe"), checkpoint, tmp_path, folder=tmp_path)


def test_skips_reading_weights_that_will_be_overwritten(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers weights that are copied from the policy, and a policy that resumes from a checkpoint."""
    read: list[int] = []
    real = StoredTensor._bytes
    monkeypatch.setattr(StoredTensor, "_bytes", lambda self, begin, size: read.append(size) or real(self, begin, size))
    saved = str(tmp_path / "saved")
    flags = {"keep_old_actor": True, "save": saved, "load": saved, "advantage_estimator": "ppo"}
    first = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    one_copy = sum(tensor.nbytes for tensor in first.weights.values())
    assert sum(read) == 2 * one_copy  # the policy and the critic
    first.train(0, make_samples(3, 3))
    first.trainer.save(0)
    read.clear()
    resumed = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    assert (read, resumed.start) == ([], 1)
    for name, tensor in first.weights.items():
        assert torch.equal(resumed.weights[name], tensor)
