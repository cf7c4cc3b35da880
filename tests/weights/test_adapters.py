"""LoRA adapter sync: with every transport the engines hold the bytes of the merged model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.cluster.process_group import join_process_group, leave_process_group
from slime.config import Config
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.client import EngineClient, EngineRejected
from slime.errors import UserError
from slime.models.delta.apply import tensor_checksums
from slime.models.peft_adapter import AdapterConfig, merge_lora, tensor_names, write_adapter
from slime.weights import choose_transport, make_publisher
from slime.weights.transport import largest_adapter_bytes
from tests.tiny_models import make_model_folder
from tests.weights.conftest import LocalSource, Loop
from tests.weights.real import checksums, log_probs

PROMPT = [5, 9, 3, 17, 4, 11]
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 6.0, "lora_sync": "adapter", "update_weight_pause_mode": "abort"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[EngineFleet]:
    config = Config(hf_checkpoint=str(folder), rollout_num_gpus=2, engine_max_total_tokens=1024)
    with EngineFleet(config, device="cpu", run_dir=tmp_path_factory.mktemp("run"), model_path=folder) as fleet:
        yield fleet


class AdapterSource(LocalSource):
    """A frozen model with an adapter on its q_proj and down_proj that changes with every step."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.facts = AdapterConfig(4, 6.0, torch.float32)
        self.modules = [name for name, module in self.model.named_modules() if name.endswith(("q_proj", "down_proj"))]
        self.tensors: dict[str, torch.Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self.step(0)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules:
            out, size = self.model.get_parameter(f"{module}.weight").shape
            for name, shape in zip(tensor_names(module), ((4, size), (out, 4)), strict=True):
                self.tensors[name] = torch.randn(shape, generator=generator) * 0.3

    def merged(self) -> dict[str, torch.Tensor]:
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for module in self.modules:
            a, b = (self.tensors[name] for name in tensor_names(module))
            weight = f"{module}.weight"
            weights[weight] = merge_lora(weights[weight], a, b, scale=self.facts.scale, dtype=torch.float32)
        return weights

    def weight_checksums(self) -> dict[str, str]:
        return tensor_checksums(self.merged().items())

    def log_probs(self, tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits = torch.func.functional_call(self.model, self.merged(), (torch.tensor([tokens]),)).logits[0]
        scores = torch.log_softmax(logits, dim=-1)
        return [float(scores[position, token]) for position, token in enumerate(tokens[1:])]

    def export_adapter(self, out_dir: str, version: int) -> list[str]:
        written = write_adapter(Path(out_dir), self.tensors, self.facts, base_model="base", target_modules=self.modules)
        return [str(path) for path in written]

    def adapter_buckets(self) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
        tensors = [{"name": n, "dtype": "float32", "shape": list(t.shape)} for n, t in self.tensors.items()]
        return self.facts.to_dict(), [tensors[:3], tensors[3:]]

    def join_engines(self, *, timeout_s: float, **meeting: Any) -> None:
        self._group = join_process_group(rank=0, timeout_s=timeout_s, **meeting)

    def broadcast_adapter(self, version: int) -> None:
        for tensor in self.tensors.values():
            dist.broadcast(tensor, src=0, group=self._group)

    def leave_engines(self) -> None:
        if self._group is not None:
            leave_process_group(self._group)


def make(config: Config, source: AdapterSource, clients: list[EngineClient], run_dir: Path, run_async: Loop) -> Any:
    return make_publisher(
        config, device="cpu", run_dir=run_dir, source=source, clients=clients, run_async=run_async  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("transport", ["tensor", "nccl", "disk"])
def test_engines_hold_the_bytes_of_the_merged_model(
    tmp_path: Path, folder: Path, fleet: EngineFleet, run_async: Loop, transport: str
) -> None:
    source, clients = AdapterSource(folder), [EngineClient(url, api_key=fleet.key) for url in fleet.urls]
    config = Config(
        hf_checkpoint=str(folder), update_weight_transport=transport, check_weight_update_equal=True, **LORA
    )
    publisher = make(config, source, clients, tmp_path, run_async)
    whole = sum(tensor.nbytes for tensor in source.merged().values())
    for version in (0, 1, 2):
        source.step(version)
        result = publisher.publish(version)
        adapter = sum(tensor.nbytes for tensor in source.tensors.values())
        assert adapter <= result.bytes < adapter + 4096
        assert result.metrics()["perf/update_weights_wire_bytes"] == result.bytes < whole / 2
        assert result.in_words().startswith(f"version {version} on all engines ({result.bytes / 2**20:.3g} MiB, ")
        for client in clients:
            found = checksums(client, run_async)
            assert {name: found[name] for name in source.weight_checksums()} == source.weight_checksums()
        scored, engine_version = log_probs(clients[0], run_async, PROMPT)
        assert engine_version == str(version)
        assert scored == pytest.approx(source.log_probs(PROMPT), abs=1e-4)
    kept = sorted(path.name for path in (tmp_path / "weights").glob("weight_v*")) if transport == "disk" else []
    assert kept == (["weight_v000002"] if transport == "disk" else [])
    publisher.close()
    source.leave_engines()
    for client in clients:
        run_async(client.aclose())


@pytest.mark.parametrize("transport", ["tensor", "nccl"])
def test_restarted_engine_needs_only_the_adapter(
    tmp_path: Path, folder: Path, fleet: EngineFleet, run_async: Loop, transport: str
) -> None:
    source, clients = AdapterSource(folder), [EngineClient(url, api_key=fleet.key) for url in fleet.urls]
    config = Config(hf_checkpoint=str(folder), update_weight_transport=transport, **LORA)
    publisher = make(config, source, clients, tmp_path, run_async)
    publisher.publish(3)
    fleet.restart(0)
    assert run_async(clients[0].get_weight_version()) == "default"
    brought = publisher.bring([clients[0]], 3)
    assert brought is (transport == "tensor")  # broadcast creates a new process group in the next update
    if not brought:
        publisher.publish(3)
    expected = source.weight_checksums()
    for client in clients:
        found = checksums(client, run_async)
        assert {name: found[name] for name in expected} == expected
        assert run_async(client.get_weight_version()) == "3"
    publisher.close()
    source.leave_engines()
    for client in clients:
        run_async(client.aclose())


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_adapter_with_a_wrong_shape_keeps_the_previous_version(
    tmp_path: Path, folder: Path, fleet: EngineFleet, run_async: Loop, transport: str
) -> None:
    source, client = AdapterSource(folder), EngineClient(fleet.urls[0], api_key=fleet.key)
    config = Config(hf_checkpoint=str(folder), update_weight_transport=transport, **LORA)
    publisher = make(config, source, [client], tmp_path, run_async)
    publisher.publish(5)
    before = checksums(client, run_async)
    a, _ = tensor_names(source.modules[0])
    source.tensors[a] = torch.zeros(4, 7)
    with pytest.raises(EngineRejected, match="has shape"):
        publisher.publish(6)
    assert log_probs(client, run_async, PROMPT)[1] == "5"
    assert checksums(client, run_async) == before
    publisher.close()
    run_async(client.aclose())


def test_staging_size_is_that_of_the_adapter(folder: Path) -> None:
    matrices = [t for n, t in AutoModelForCausalLM.from_pretrained(folder).named_parameters() if t.dim() == 2]
    assert largest_adapter_bytes(folder, 4) == sum(16 * sum(tensor.shape) for tensor in matrices)


@pytest.mark.parametrize(
    ("flags", "kind", "sentence"),
    [
        ({"update_weight_mode": "delta"}, "embedded", "sends the adapter whole, so there is no delta"),
        ({}, "sglang", "use --lora-sync merged, or the embedded engine"),
    ],
)
def test_adapter_sync_rejects_delta_mode_and_sglang(flags: dict[str, Any], kind: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        choose_transport(Config(hf_checkpoint="x", **LORA, **flags), "cpu", kind)
    merged_sync = {**LORA, **flags, "lora_sync": "merged"}
    assert choose_transport(Config(hf_checkpoint="x", **merged_sync), "cpu", kind)[0] in ("disk", "tensor")


def test_transport_reason_mentions_the_adapter() -> None:
    assert choose_transport(Config(hf_checkpoint="x", **LORA), "cpu") == (
        "tensor",
        "trainer and engines are on one machine, the adapter on cpu passes through files in shared memory",
    )
