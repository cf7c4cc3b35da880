"""Whole runs whose samples come from clients of the agent endpoints, with weight updates and killed processes."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.cluster.process import process_tree
from slime.data.buffer.database import open_read_only
from slime.data.buffer.reader import NAME, Choice, Reader
from slime.data.sample import Sample
from tests.e2e.runs import TRAIN, started, wait_until
from tests.e2e.test_fault_tolerance import engine_pids
from tests.tiny_models import make_model_folder

ROLLOUTS, PROMPTS, SAMPLES = 3, 2, 2
AGENT = """\
import json

import aiohttp

from slime.agent.remote_session import open_session


async def said(http, session, messages, stream):
    body = {"model": session.model, "messages": messages, "stream": stream}
    async with http.post(session.openai_url + "/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not stream:
            return (await response.json())["choices"][0]["message"]["content"]
        lines = (await response.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" not in events[-1], events[-1]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def f(args, sample, sampling_params):
    async with open_session(args, sample, sampling_params) as session:
        messages = [{"role": "user", "content": sample.prompt}]
        async with aiohttp.ClientSession(headers={"x-api-key": session.key}) as http:
            for turn in range(3 if sample.group_index % 4 < 2 else 8):
                reply = await said(http, session, messages, stream=turn == 1)
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and then?"}]
        return await session.finish()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("agents") / "model", max_position_embeddings=2048)


def settings(folder: Path, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    (out / "agent.py").write_text(AGENT)
    (out / "prompts.jsonl").write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    return {
        "hf_checkpoint": str(folder), "prompt_data": str(out / "prompts.jsonl"), "num_rollout": ROLLOUTS,
        "rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 40,
        "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096, "lr": 1e-3, "progress": "none",
        "keep_samples": True, "strict_tokens": True, "output_dir": str(out / "run"),
        "custom_generate_function_path": f"{out / 'agent.py'}:f",
    }  # fmt: skip


def by_index(args: Any, sample: Sample) -> float:
    assert sample.index is not None
    return float(sample.index % 2)


def consumed(out: Path) -> list[Sample]:
    with open_read_only(out / "run" / NAME) as connection:
        return [found.sample for found in Reader(connection).samples(Choice(state="consumed"))]


def server_pids() -> list[int]:
    """Returns the pids of the agent servers of the run in this process."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in process_tree(os.getpid())}
    return [pid for pid, parts in words.items() if b"slime.agent.server" in parts and b"-I" not in parts]


def check_sessions(out: Path) -> list[Sample]:
    """Asserts that consumed samples are complete sessions without re-tokenized tokens. Returns the samples."""
    samples = consumed(out)
    assert len({sample.index for sample in samples}) == len(samples) == ROLLOUTS * PROMPTS * SAMPLES
    for sample in samples:
        counters = sample.metadata["session"]
        assert sample.group_index is not None
        assert counters["turns"] == (3 if sample.group_index % 4 < 2 else 8)
        assert (counters["forked"], counters["retokenised_tokens"]) == (0, 0)
        assert sample.loss_mask is not None
        assert len(sample.loss_mask) == sample.response_length
    assert not server_pids()
    return samples


def test_partial_rollouts_hold_sessions_and_mask_off_policy_tokens(folder: Path, tmp_path: Path) -> None:
    flags = {"over_sampling_batch_size": 4, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    result = slime.run(reward=by_index, **settings(folder, tmp_path), **flags)
    were_held = 0
    for sample in check_sessions(tmp_path):
        versions = [version for version, count in sample.version_spans for _ in range(count)]
        trained = {version for version, bit in zip(versions, sample.loss_mask or (), strict=True) if bit}
        assert len(trained) == 1
        were_held += len({*versions} - {None}) > 1
    assert were_held
    assert sum(metrics["rollout/held_groups"] for metrics in result.metrics) > 0
    assert all(metrics["rollout/failed/count"] == 0.0 for metrics in result.metrics)


def test_open_sessions_survive_weight_updates_and_an_engine_kill(folder: Path, tmp_path: Path) -> None:
    struck = []

    def reward(args: Any, sample: Sample) -> float:
        if not struck:
            struck.append(sample.index)
            os.kill(engine_pids()[0], signal.SIGKILL)
        return by_index(args, sample)

    flags = {
        "async_mode": "full", "max_weight_staleness": 1, "rollout_num_gpus": 2, "use_fault_tolerance": True,
        "rollout_health_check_interval": 0.3, "rollout_health_check_timeout": 120.0, "n_samples_per_prompt": SAMPLES,
    }  # fmt: skip
    result = slime.run(reward=reward, **(settings(folder, tmp_path) | flags))
    samples = check_sessions(tmp_path)
    assert all(metrics["rollout/failed/count"] == 0.0 for metrics in result.metrics)
    versions = {version for sample in samples for version, _ in sample.version_spans if version is not None}
    assert {"0", "1"} <= versions
    for sample in samples:
        assert sum(count for _, count in sample.version_spans) == sample.response_length
    assert struck


def test_run_survives_a_killed_agent_server(folder: Path, tmp_path: Path) -> None:
    lock, struck = threading.Lock(), []

    def reward(args: Any, sample: Sample) -> float:
        with lock:
            if not struck:
                struck.extend(server_pids())
                os.kill(struck[0], signal.SIGKILL)
        return by_index(args, sample)

    result = slime.run(reward=reward, **(settings(folder, tmp_path) | {"num_rollout": 2}))
    assert len(struck) == 1
    failed = [sample for sample in consumed(tmp_path) if sample.status is Sample.Status.FAILED]
    assert all((sample.failure or "").startswith("generate: AgentServerFailed: ") for sample in failed)
    assert result.metrics[-1]["rollout/failed/count"] == 0.0  # restarted for the second rollout


def test_killed_driver_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    flags = [
        word
        for name, value in (settings(folder, tmp_path) | {"num_rollout": 1000}).items()
        if name not in ("progress", "keep_samples")
        for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]
    command = [*TRAIN, *flags, "--rm-type", "random", "--device", "cpu"]
    with started(command, tmp_path) as running:
        assert wait_until(lambda: bool(running.processes("slime.agent.server")), 240)
        running.popen.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not running.processes(), 120)
