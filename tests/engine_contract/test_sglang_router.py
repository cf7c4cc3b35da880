"""A real sglang-router in front of a real SGLang server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.engine.fleet.external import PAUSE_MODES, UPDATE_ROUTES, probe
from slime.engine.http.blocking import NoResponse, ask
from slime.engine.http.protocol import generate_payload
from slime.engine.sglang.router import RoutedPool, RouterDied, SglangRouter
from tests.engine.pids import pids_of
from tests.engine_contract.engines import Engine, after_first_tokens, engine_flags
from tests.engine_contract.test_contract import GREEDY, LONG, PROMPT

pytestmark = pytest.mark.parametrize("running", ["sglang"], indirect=True)


@pytest.fixture
def router(engine: Engine, first_model: Path, tmp_path: Path) -> Iterator[SglangRouter]:
    config = Config(hf_checkpoint=str(first_model), carried={"router_policy": "round_robin"}, **engine_flags("sglang"))
    made = SglangRouter(config, run_dir=tmp_path, key=engine.fleet.key)
    made.start(engine.fleet.launches)
    yield made
    made.stop()
    with pytest.raises(NoResponse):
        ask("GET", f"{made.url}/liveness")


def generate_through(router: SglangRouter, params: dict[str, Any], input_ids: list[int] = PROMPT) -> Any:
    body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}
    status, answer = ask("POST", f"{router.url}/generate", body, timeout_s=60, api_key=router.key)
    assert status == 200, answer
    return answer


def test_router_forwards_requests_and_answers_unchanged(engine: Engine, router: SglangRouter) -> None:
    direct, routed = engine.generate(PROMPT, **GREEDY), generate_through(router, GREEDY)
    assert routed["output_ids"] == direct["output_ids"]
    pairs = zip(*(one["meta_info"]["output_token_logprobs"] for one in (direct, routed)), strict=True)
    assert all(ours[1:] == theirs[1:] and abs(ours[0] - theirs[0]) < 1e-5 for ours, theirs in pairs)
    assert routed["meta_info"]["weight_version"] == "first"
    stop = direct["output_ids"][5]
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, "stop_token_ids": [stop]}
    assert generate_through(router, params)["output_ids"] == engine.generate(PROMPT, **params)["output_ids"]
    text = direct["text"]
    kept: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, "stop": [text[3:6]], "no_stop_trim": True}
    assert generate_through(router, kept)["text"] == engine.generate(PROMPT, **kept)["text"]


def test_fields_dropped_by_the_router_reach_the_engine(engine: Engine, router: SglangRouter) -> None:
    params = {"temperature": 0, "max_new_tokens": 3, "logit_bias": {"284": 1000.0}}
    assert generate_through(router, params)["output_ids"] != [284, 284, 284]

    async def scenario() -> Any:
        pool = RoutedPool([engine.url], router.url, api_key=router.key)
        result = await pool.sample(generate_payload(PROMPT, params))
        await pool.aclose()
        return result

    assert asyncio.run(scenario()).token_ids == [284, 284, 284]


def test_pool_generates_through_the_router_and_aborts_at_the_engine(engine: Engine, router: SglangRouter) -> None:
    async def scenario() -> Any:
        pool = RoutedPool([engine.url], router.url, api_key=router.key)
        payload = {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True}
        asked = asyncio.ensure_future(pool.sample(payload, 7))
        await asyncio.to_thread(after_first_tokens, engine)
        await pool.broadcast("abort", abort_all=True)
        result = await asked
        await pool.aclose()
        return result

    result = asyncio.run(scenario())
    assert result.finish_type == "abort"
    assert 0 < len(result.token_ids) < 1600


def test_router_removes_and_adds_workers_and_its_death_is_reported(engine: Engine, router: SglangRouter) -> None:
    assert [worker["url"] for worker in router.workers()] == [engine.url]
    router.remove_worker(engine.url)
    assert wait_for(lambda: router.workers() == [])
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    assert ask("POST", f"{router.url}/generate", body, api_key=router.key)[0] == 503
    router.add_worker(engine.url)
    assert wait_for(lambda: [worker["is_healthy"] for worker in router.workers()] == [True])
    assert len(generate_through(router, GREEDY)["output_ids"]) == 16
    os.kill(pids_of(router)[-1], signal.SIGKILL)
    assert wait_for(lambda: pids_of(router) == [])
    with pytest.raises(RouterDied, match="router ended with code -9"):
        router.check()


def test_sglang_server_has_all_capabilities(engine: Engine, first_model: Path) -> None:
    found = probe(engine.url, api_key=engine.fleet.key)
    assert (found.kind, found.model_path) == ("sglang", str(first_model))
    assert found.pause_modes == set(PAUSE_MODES)
    assert found.transports == set(UPDATE_ROUTES)
    assert (found.releases_memory, found.echoes_weight_version, found.returns_log_probs) == (True, True, True)


def test_server_and_router_require_a_key_hidden_from_command_lines(engine: Engine, router: SglangRouter) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    for url in (engine.url, router.url):
        assert ask("POST", f"{url}/generate", body)[0] == 401
        assert ask("POST", f"{url}/generate", body, api_key=router.key)[0] == 200
        assert ask("POST", f"{url}/flush_cache", {})[0] == 401
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*pids_of(engine.fleet), *pids_of(router))]
    assert words
    assert not any(router.key.encode() in line for line in words)


def wait_for(condition: Any) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(condition())
