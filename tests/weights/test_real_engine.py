"""Fleet, client, publisher and the embedded engine together: what is published is what the engine then scores with."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.config import Config
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.client import EngineClient
from slime.errors import UserError
from slime.weights import make_publisher
from tests.tiny_models import make_model_folder

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


class Trainer:
    """A model that changes, exported as the trainers export theirs: one bucket per half of the tensors."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def export_weights(self, out_dir: Path, version: int) -> list[Path]:
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        names = sorted(tensors)
        paths = []
        for index, part in enumerate((names[::2], names[1::2])):
            paths.append(out_dir / f"bucket-{index}.safetensors")
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
def test_the_engine_scores_with_the_published_weights(
    tmp_path: Path, folder: Path, fleet: EngineFleet, run_async: Any, transport: str
) -> None:
    trainer = Trainer(folder)
    client = EngineClient(fleet.urls[0])
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
    """Has a handle to give that no process on a CPU can open, or none."""

    def __init__(self, folder: Path, shared: dict[str, str]) -> None:
        super().__init__(folder)
        self.shared = shared
        self.calls: list[str] = []

    def weight_buckets(self) -> list[list[dict[str, Any]]]:
        tensors = dict(self.model.named_parameters())
        return [[{"name": name, "dtype": "float32", "shape": list(one.shape)}] for name, one in tensors.items()]

    def share_bucket(self, number: int, version: int) -> dict[str, str]:
        self.calls.append(f"share {number}")
        return self.shared

    def stop_sharing(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        ({"handle": base64.b64encode(bytes(64)).decode()}, "this engine computes on cpu"),
        ({"refused": "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"}, "no handle to give: cuIpcGetMemHandle"),
    ],
)
def test_weights_go_through_files_where_handles_cannot_be_opened(
    tmp_path: Path,
    folder: Path,
    fleet: EngineFleet,
    run_async: Any,
    shared: dict[str, str],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, client = Sharing(folder, shared), EngineClient(fleet.urls[0])
    config = Config(hf_checkpoint=str(folder), update_weight_transport="tensor", update_weight_pause_mode="abort")
    publisher = make_publisher(
        config, device="cuda", run_dir=tmp_path, source=trainer, clients=[client], run_async=run_async
    )
    for version in (1, 2):
        trainer.step(version)
        publisher.publish(version)
        scored, engine_version = engine_log_probs(client, run_async, PROMPT)
        assert engine_version == str(version)
        assert scored == pytest.approx(trainer.log_probs(PROMPT), abs=1e-4)
    assert trainer.calls == ["share 1", "stop"], "what was refused once is not tried again"
    assert [reason in record.getMessage() for record in caplog.records if "by device handle" in record.message] == [
        True
    ]
    publisher.close()
    run_async(client.aclose())


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    config = Config(hf_checkpoint=str(empty), rollout_num_gpus=1)
    with pytest.raises(UserError, match="empty"):
        EngineFleet(config, device="cpu", run_dir=tmp_path, model_path=empty).start()
