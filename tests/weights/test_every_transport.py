"""Two trainer ranks and two engines as processes: after each update both engines hold the bytes of the trainers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.cluster.process import process_tree
from slime.config import Config, derive
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.client import EngineClient
from slime.train.trainer_group import TrainerGroup
from slime.weights import make_publisher
from tests.engine.pids import pids_of
from tests.listeners import listening_addresses
from tests.rows import long
from tests.tiny_models import make_model_folder
from tests.train.tiny_training import make_samples, weight_checksums
from tests.weights.conftest import Loop
from tests.weights.real import checksums, log_probs

MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
SHAPES: dict[str, dict[str, Any]] = {"qwen3": {"tie_word_embeddings": True}, "qwen3_moe": MOE}
TRANSPORTS: dict[str, dict[str, Any]] = {
    "tensor": {"update_weight_transport": "tensor"},
    "region": {"update_weight_transport": "tensor", "update_weight_pause_mode": "in_place"},
    "broadcast": {"update_weight_transport": "nccl", "update_weight_pause_mode": "in_place"},
    "disk": {"update_weight_transport": "disk", "update_weight_pause_mode": "retract"},
    "xor": {"update_weight_mode": "delta", "update_weight_delta_encoding": "xor"},
    "overwrite": {
        "update_weight_mode": "delta",
        "update_weight_delta_encoding": "overwrite",
        "update_weight_delta_checksum": "adler32",
    },
    "sparse": {
        "update_weight_mode": "delta",
        "update_weight_delta_encoding": "sparse",
        "update_weight_delta_checksum": "sum64",
    },
    "adapter": {"lora_rank": 4, "lr": 1e-2, "lora_sync": "adapter"},
    "adapter, broadcast": {
        "lora_rank": 4,
        "lr": 1e-2,
        "lora_sync": "adapter",
        "update_weight_transport": "nccl",
        "update_weight_pause_mode": "in_place",
    },
}
CASES = [
    ("broadcast", "qwen3_moe"),
    ("disk", "qwen3"),
    ("xor", "qwen3_moe"),
    ("overwrite", "qwen3"),
    ("sparse", "qwen3_moe"),
    ("tensor", "qwen3"),
    ("region", "qwen3_moe"),
    ("adapter", "qwen3"),
    ("adapter, broadcast", "qwen3_moe"),
    long("broadcast", "qwen3"),
    long("disk", "qwen3_moe"),
    long("xor", "qwen3"),
]
UPDATES = 3
PROMPT = [5, 9, 3, 17, 4, 11]


@pytest.fixture(scope="module")
def engines_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, EngineFleet]]]:
    """`engines_of(kind)`: a model folder and two engines that serve it in bfloat16."""
    started: dict[str, tuple[Path, EngineFleet]] = {}
    with ExitStack() as stack:

        def engines(kind: str) -> tuple[Path, EngineFleet]:
            if kind not in started:
                folder = make_model_folder(tmp_path_factory.mktemp("models") / kind, kind, **SHAPES[kind])
                config = make_config(folder)
                fleet = EngineFleet(config, device="cpu", run_dir=tmp_path_factory.mktemp("run"), model_path=folder)
                started[kind] = folder, stack.enter_context(fleet)
            return started[kind]

        yield engines


def make_config(folder: Path, **flags: Any) -> Config:
    return derive(
        Config(
            hf_checkpoint=str(folder),
            rollout_num_gpus=2,
            actor_num_gpus_per_node=2,
            engine_max_total_tokens=1024,
            rollout_batch_size=3,
            n_samples_per_prompt=3,
            global_batch_size=9,
            num_rollout=9,
            micro_batch_size=2,
            dtype="bfloat16",
            distributed_timeout_minutes=2,
            update_weight_buffer_size=2**16,
            check_weight_update_equal=True,
            **{"lr": 1e-4, **flags},
        )
    )


def expected_log_probs(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].float(), dim=-1)
    return [float(scores[position, token]) for position, token in enumerate(PROMPT[1:])]


@pytest.mark.parametrize(("transport", "kind"), CASES)
def test_engines_hold_the_bytes_of_the_trainers_after_each_update(
    tmp_path: Path,
    engines_of: Callable[[str], tuple[Path, EngineFleet]],
    run_async: Loop,
    transport: str,
    kind: str,
) -> None:
    folder, fleet = engines_of(kind)
    config = make_config(folder, **TRANSPORTS[transport])
    clients = [EngineClient(url, api_key=fleet.key) for url in fleet.urls]
    results, seen = [], []
    with TrainerGroup(config, device="cpu", run_dir=tmp_path) as trainers:
        trainers.start()
        device = "cuda" if transport == "region" else "cpu"  # CPU trainers refuse cuda, so a region is used
        publisher = make_publisher(
            config, device=device, run_dir=tmp_path, source=trainers, clients=clients, run_async=run_async
        )
        for version in range(UPDATES + 1):
            if version:
                trainers.train(version - 1, make_samples(3, 3, seed=version))
            results.append(publisher.publish(version))
            expected = weight_checksums(trainers)
            for client in clients:
                found = checksums(client, run_async)
                assert {name: found.get(name) for name in expected} == expected
            seen.append(log_probs(clients[0], run_async, PROMPT))
        if sys.platform == "linux":  # stores, gloo and engines listen only on loopback
            pids = [pid for guard in trainers.pids for pid in process_tree(guard)]
            assert listening_addresses([*pids, *pids_of(fleet)]) == {"127.0.0.1"}
        saved = trainers.save_hf(tmp_path / "saved")
        publisher.close()
    for client in clients:
        run_async(client.aclose())
    assert [version for _, version in seen] == [str(version) for version in range(UPDATES + 1)]
    assert seen[-1][0] == pytest.approx(expected_log_probs(saved), abs=0.15)
    assert seen[-1][0] != seen[0][0]
    is_delta = config.update_weight_mode == "delta"
    assert [result.density is not None for result in results] == [False, *[is_delta] * UPDATES]
    assert all(result.full_fallbacks == 0 for result in results)
    if is_delta:
        assert all(0 < (result.density or 0) < 0.3 for result in results[1:])
        assert all(result.bytes < results[0].bytes for result in results[1:])
    else:
        assert len({result.bytes for result in results}) == 1
    if config.lora_sync == "adapter":
        adapter = load_file(saved / "adapter" / "adapter_model.safetensors")
        assert 0 <= results[0].bytes - sum(tensor.nbytes for tensor in adapter.values()) < 16384
