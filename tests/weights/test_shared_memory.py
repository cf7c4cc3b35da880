"""Memory shared by a trainer and opened by an engine: copies, rejections, and reopening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.cluster.memory.regions import HostRegion
from slime.engine.embedded.errors import BadRequest
from slime.engine.embedded.weights.ipc import HostMemory, SharedMemory
from slime.engine.embedded.weights.parameter_views import FolderViews
from slime.engine.embedded.weights.process_groups import AnnouncedBucket
from slime.train.weight_export.ipc import SharedWeights
from tests.tiny_models import make_model_folder
from tests.weights.model_source import OneActor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def parse_announced(answer: dict[str, Any]) -> AnnouncedBucket:
    (bucket,) = answer["buckets"]
    dtypes = [getattr(torch, one["dtype"]) for one in bucket]
    shapes = [tuple(one["shape"]) for one in bucket]
    return AnnouncedBucket("", [one["name"] for one in bucket], dtypes, shapes, 1, 1)


def share_weights(model: Any, path: Path) -> tuple[SharedWeights, dict[str, Any]]:
    """Share weights in bfloat16, gathered in several parts, and return the answer of the trainer rank."""
    actor: Any = OneActor(model)
    weights = SharedWeights(actor, dtype=torch.bfloat16, buffer_size=2**16)
    assert len(actor.backend.export.plan(torch.bfloat16, 2**16)) > 1
    answer = weights.share_bucket(1, 7, str(path))
    assert actor.exported == [7]
    return weights, answer


def test_shared_bucket_is_loaded_in_the_dtype_of_the_model(tmp_path: Path, folder: Path) -> None:
    trained, served = load_model(folder), load_model(folder)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.37)
    _, answer = share_weights(trained, tmp_path / "region")
    engine = SharedMemory(FolderViews(served), CPU)
    opened = engine.open(HostMemory(answer["memory"]["region"]), parse_announced(answer))
    assert opened.load() == sum(parameter.numel() * 2 for parameter in trained.parameters())
    for name, parameter in served.named_parameters():
        assert torch.equal(parameter, trained.state_dict()[name].to(torch.bfloat16).float()), name
    assert set(opened.seconds) == {"open_seconds", "copy_seconds"}


def test_closed_bucket_cannot_be_loaded(tmp_path: Path, folder: Path) -> None:
    served = load_model(folder)
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    _, answer = share_weights(load_model(folder), tmp_path / "region")
    engine = SharedMemory(FolderViews(served), CPU)
    opened = engine.open(HostMemory(answer["memory"]["region"]), parse_announced(answer))
    opened.close()
    with pytest.raises(BadRequest, match="did not wait"):
        opened.load()
    assert all(torch.equal(before[name], tensor) for name, tensor in served.state_dict().items())


def test_region_that_is_too_small_is_rejected(tmp_path: Path, folder: Path) -> None:
    served = load_model(folder)
    engine = SharedMemory(FolderViews(served), CPU)
    _, answer = share_weights(served, tmp_path / "region")
    small = HostRegion.create(tmp_path / "small", 512)
    with pytest.raises(BadRequest, match="bytes and the shared memory has 512"):
        engine.open(HostMemory(str(small.path)), parse_announced(answer))


def test_region_is_reused_and_reopened_after_a_trainer_restart(tmp_path: Path, folder: Path) -> None:
    """A restarted trainer creates another file under the same name."""
    served, path = load_model(folder), tmp_path / "region"
    engine = SharedMemory(FolderViews(served), CPU)
    for factor in (2.0, 3.0):
        trained = load_model(folder)
        actor: Any = OneActor(trained)
        weights = SharedWeights(actor, dtype=torch.float32, buffer_size=2**16)
        for _ in range(2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(factor)
            inode = path.stat().st_ino if path.exists() else None
            answer = weights.share_bucket(1, 7, str(path))
            weights.stop_sharing()
            opened = engine.open(HostMemory(str(path)), parse_announced(answer))
            opened.load()
            opened.close()
            for name, tensor in served.state_dict().items():
                assert torch.equal(tensor, trained.state_dict()[name]), name
        assert path.stat().st_ino == inode, "the second update of a trainer has the region of its first"
