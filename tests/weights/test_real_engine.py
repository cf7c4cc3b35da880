"""Fleet, client, publisher and embedded engine together: the engine scores with the published weights."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.cluster.memory.regions import HostRegion, align_up
from slime.config import Config
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.client import EngineClient
from slime.errors import UserError
from slime.train.weight_export.ipc import SharedWeights
from slime.weights import make_publisher
from slime.weights.folder import FolderPublisher, VersionFolders
from slime.weights.ipc import HOST, SharedMemoryPublisher
from slime.weights.publisher import PublisherSettings
from tests.tiny_models import make_model_folder
from tests.weights.conftest import LocalSource
from tests.weights.model_source import OneActor

PROMPT = [5, 9, 3, 17, 4, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[EngineFleet]:
    config = Config(hf_checkpoint=str(folder), rollout_num_gpus=1, engine_max_total_tokens=1024)
    run_dir = tmp_path_factory.mktemp("run")
    with EngineFleet(config, device="cpu", run_dir=run_dir, model_path=folder) as fleet:
        yield fleet


class Trainer(LocalSource):
    """A changing model, exported as trainers do: one bucket per half of the tensors."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def export_weights(self, out_dir: str, version: int) -> list[str]:
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        names = sorted(tensors)
        paths = []
        for index, part in enumerate((names[::2], names[1::2])):
            paths.append(f"{out_dir}/bucket-{index}.safetensors")
            save_file({name: tensors[name] for name in part}, paths[-1])
        return paths

    def log_probs(self, tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0]
        scores = torch.log_softmax(logits, dim=-1)
        return [float(scores[position, token]) for position, token in enumerate(tokens[1:])]


def engine_log_probs(client: EngineClient, run_async: Any, tokens: list[int]) -> tuple[list[float], str]:
    payload = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = run_async(client.generate(payload))["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta["weight_version"]


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_engine_scores_with_the_published_weights(
    tmp_path: Path, folder: Path, fleet: EngineFleet, run_async: Any, transport: str
) -> None:
    trainer = Trainer(folder)
    client = EngineClient(fleet.urls[0], api_key=fleet.key)
    config = Config(hf_checkpoint=str(folder), update_weight_transport=transport, update_weight_pause_mode="abort")
    publisher = make_publisher(
        config, device="cpu", run_dir=tmp_path, source=trainer, clients=[client], run_async=run_async
    )
    seen = []
    for version in (0, 1, 2):
        if version:
            trainer.step(version)
        publisher.publish(version)
        scored, engine_version = engine_log_probs(client, run_async, PROMPT)
        assert engine_version == str(version)
        assert scored == pytest.approx(trainer.log_probs(PROMPT), abs=1e-4)
        seen.append(scored)
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)
    publisher.close()
    run_async(client.aclose())
    fleet.check()


class Sharing(Trainer):
    """Shares its tensors in host regions, as a trainer rank does; answers device requests with `device`."""

    def __init__(self, folder: Path, device: dict[str, Any], *, has_region: bool = True) -> None:
        super().__init__(folder)
        actor: Any = OneActor(self.model)
        self.weights = SharedWeights(actor, dtype=torch.float32, buffer_size=2**14)
        self.device = device
        self.has_region = has_region
        self.calls: list[str] = []

    def share_bucket(self, number: int, version: int, region: str | None) -> dict[str, Any]:
        self.calls.append(f"{'device' if region is None else 'region'} {number}")
        if region is None:
            return self.device
        return self.weights.share_bucket(number, version, region) if self.has_region else {"refused": "no space left"}

    def stop_sharing(self) -> None:
        self.calls.append("stop")
        self.weights.stop_sharing()


UNOPENABLE = {
    "memory": {"handle": base64.b64encode(bytes(64)).decode(), "offset": 0, "device": "GPU-0"},
    "buckets": [[{"name": "model.norm.weight", "dtype": "float32", "shape": [64]}]],
}


@pytest.mark.parametrize(
    ("device", "reason", "has_region"),
    [
        (UNOPENABLE, "this engine computes on cpu", True),
        (
            {"refused": "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"},
            "the trainer cannot share memory: cuIpcGetMemHandle",
            False,
        ),
    ],
)
def test_shared_memory_publisher_falls_back_to_the_next_path(
    tmp_path: Path,
    folder: Path,
    fleet: EngineFleet,
    run_async: Any,
    device: dict[str, Any],
    reason: str,
    has_region: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, client = Sharing(folder, device, has_region=has_region), EngineClient(fleet.urls[0], api_key=fleet.key)
    config = Config(hf_checkpoint=str(folder), update_weight_transport="tensor", update_weight_pause_mode="abort")
    publisher = make_publisher(
        config, device="cuda", run_dir=tmp_path, source=trainer, clients=[client], run_async=run_async
    )
    for version in (1, 2):
        trainer.step(version)
        result = publisher.publish(version)
        scored, engine_version = engine_log_probs(client, run_async, PROMPT)
        assert engine_version == str(version)
        assert scored == pytest.approx(trainer.log_probs(PROMPT), abs=1e-4)
        assert 0 < result.paused_seconds < result.seconds
    told = [record.getMessage() for record in caplog.records if "instead of" in record.message]
    assert reason in told[0]
    tried = ["device 1", "stop"] if "memory" in device else ["device 1"]
    if has_region:
        assert trainer.calls == [*tried, "region 1", "stop", "region 1", "stop"], "a refusal is not tried again"
    else:
        assert trainer.calls == [*tried, "region 1"]
        assert "through files in shared memory instead of a pinned region" in told[1]
    publisher.close()
    run_async(client.aclose())


class BucketTrainer(Trainer):
    """Shares every third tensor at a time, in a region of that size."""

    def share_bucket(self, number: int, version: int, region: str | None) -> dict[str, Any]:
        assert region is not None
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        parts = [list(tensors)[first::3] for first in range(3)]
        if number == 1:
            sizes = [sum(align_up(tensors[name].nbytes) for name in part) for part in parts]
            self.region = HostRegion.create(Path(region), max(sizes))
        begin = 0
        for name in parts[number - 1]:
            self.region.data[begin:][: tensors[name].nbytes].copy_(tensors[name].view(-1).view(torch.uint8))
            begin += align_up(tensors[name].nbytes)
        told = [
            [{"name": name, "dtype": "float32", "shape": list(tensors[name].shape)} for name in one] for one in parts
        ]
        return {"memory": {"region": region}, "buckets": told}

    def stop_sharing(self) -> None:
        pass


def test_weights_larger_than_the_region_are_sent_in_buckets(
    tmp_path: Path, folder: Path, fleet: EngineFleet, run_async: Any
) -> None:
    trainer, client = BucketTrainer(folder), EngineClient(fleet.urls[0], api_key=fleet.key)
    settings = PublisherSettings(trainer, [client], run_async)
    files = FolderPublisher(settings, VersionFolders(tmp_path, folder, in_memory=True), "tensors")
    publisher = SharedMemoryPublisher(settings, through_files=lambda: files, largest_bytes=1, ways=[HOST])
    trainer.step(1)
    publisher.publish(1)
    scored, engine_version = engine_log_probs(client, run_async, PROMPT)
    assert engine_version == "1"
    assert scored == pytest.approx(trainer.log_probs(PROMPT), abs=1e-4)
    publisher.close()
    run_async(client.aclose())


def test_folder_without_a_model_raises_a_user_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    config = Config(hf_checkpoint=str(empty), rollout_num_gpus=1)
    with pytest.raises(UserError, match="empty"):
        EngineFleet(config, device="cpu", run_dir=tmp_path, model_path=empty).start()
