"""Fuzzed requests leave an engine healthy and its tokens unchanged."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from tests.engine.conftest import EngineProcess
from tests.engine.fuzz import bombard, shots

REQUESTS = int(os.environ.get("SLIME_FUZZ_REQUESTS", "1000"))
SEED = int(os.environ.get("SLIME_FUZZ_SEED", "1"))
QUESTIONS: list[dict[str, Any]] = [
    {"input_ids": list(range(5, 5 + length)), "return_logprob": True,
     "sampling_params": {"max_new_tokens": 12, "temperature": temperature, "sampling_seed": 7, "ignore_eos": True}}
    for length, temperature in ((3, 0), (17, 0), (17, 0.8), (40, 1.0))
]  # fmt: skip


def answers(engine: EngineProcess) -> list[Any]:
    assert engine.post("/flush_cache", {})[0] == 200
    told = [engine.generate(**question) for question in QUESTIONS]
    return [(answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) for answer in told]


def test_fuzzed_engine_stays_healthy_and_gives_the_same_answers(qwen3_folder: Path, tmp_path: Path) -> None:
    options = ("--context-length", "64", "--max-running-requests", "16", "--max-total-tokens", "256")
    engine = EngineProcess(qwen3_folder, tmp_path / "log", *options)
    try:
        before = answers(engine)
        began = time.perf_counter()
        outcome = asyncio.run(bombard(engine.port, engine.key, shots(SEED, qwen3_folder), REQUESTS))
        print(f"{REQUESTS} requests in {time.perf_counter() - began:.0f} s: {dict(sorted(outcome.statuses.items()))}")
        assert engine.process.poll() is None, engine.log.read_text()[-3000:]
        assert outcome.wrong == []
        assert outcome.statuses[200] > REQUESTS // 10
        assert outcome.statuses[400] > REQUESTS // 10
        engine.post("/resume_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]})
        engine.post("/continue_generation", {})
        engine.post("/abort_request", {"abort_all": True})
        assert engine.get("/health_generate")[1] == {"status": "ok"}
        assert answers(engine) == before
        info = engine.get("/server_info")[1]
        assert (info["num_running_reqs"], info["num_waiting_reqs"], info["num_used_tokens"]) == (0, 0, 0)
        assert info["stale"] is None
    finally:
        assert engine.stop() == 0
    assert "ERROR slime" not in (tmp_path / "log").read_text()  # no request caused an internal error
