"""`slime serve` starts engines and a router; a run attaches, updates them and leaves them running."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.cluster.child_env import read_engine_key
from slime.engine.http.blocking import ask
from slime.errors import UserError
from tests.e2e.runs import Running, started, wait_until
from tests.engine_contract.engines import ENGINES, engine_flags
from tests.tiny_models import make_model_folder


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, first_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, list[str]]]:
    folder = tmp_path_factory.mktemp("serve")
    count = 1 if request.param == "sglang" else 2  # server start-up dominates the test time
    words = ["--hf-checkpoint", str(first_model), "--rollout-num-gpus", str(count), "--output-dir", str(folder)]
    for name, value in engine_flags(request.param).items():
        words += [f"--{name.replace('_', '-')}", value]
    with started([sys.executable, "-m", "slime.cli", "serve", *words], folder) as running:
        running.wait_for("attach a run with:")
        addresses = re.findall(r"127\.0\.0\.1:\d+", running.lines[-1])
        assert len(addresses) == count
        yield running, addresses
        os.kill(running.popen.pid, signal.SIGTERM)
        assert running.finish().code == 0
        assert wait_until(lambda: running.processes() == [], 30)


def run_attached(model: Path, addresses: list[str], tmp_path: Path, **flags: Any) -> Any:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(8)))
    return slime.run(
        hf_checkpoint=str(model), prompt_data=str(prompts), reward=lambda args, sample: float(sample.response_length),
        num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=6, progress="none",
        device="cpu", rollout_external_engine_addrs=addresses, output_dir=str(tmp_path / "out"), **flags,
    )  # fmt: skip


@pytest.mark.timeout(1800)
def test_run_attaches_updates_and_leaves_engines_running(
    served: tuple[Running, list[str]], first_model: Path, tmp_path: Path
) -> None:
    running, addresses = served
    router = next(line.split()[1] for line in running.lines if line.startswith("router"))
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    status, answer = ask("POST", f"{router}/generate", body, timeout_s=60)
    assert (status, len(answer["output_ids"])) == (200, 4)
    result = run_attached(first_model, addresses, tmp_path, update_weight_transport="disk")
    assert len(result.metrics) == 2
    assert not list((tmp_path / "out" / "logs").glob("engine-*"))
    for address in addresses:
        key = read_engine_key(int(address.rpartition(":")[2]))
        assert ask("GET", f"http://{address}/model_info", api_key=key)[1]["weight_version"] == "2"
        assert ask("POST", f"http://{address}/pause_generation", {})[0] == 401
        assert ask("GET", f"http://{address}/health")[0] == 200


def test_rejects_another_model_or_an_unreachable_address(
    served: tuple[Running, list[str]], first_model: Path, tmp_path: Path
) -> None:
    other = make_model_folder(tmp_path / "llama", model_type="llama")
    with pytest.raises(UserError, match=r"with architecture qwen3, but --hf-checkpoint .*llama has llama"):
        run_attached(other, served[1], tmp_path)
    with pytest.raises(UserError, match=r"engine http://127\.0\.0\.1:9 did not answer"):
        run_attached(first_model, ["127.0.0.1:9"], tmp_path)
