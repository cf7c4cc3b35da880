"""Engines of others that ask for a key: a run shows it to them, and to nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from slime.config import Config, derive
from slime.engine.fleet.backend import choose_router
from slime.engine.fleet.capabilities import probe
from slime.engine.fleet.external import ExternalEngines
from slime.engine.fleet.states import Load, ask_load
from slime.engine.http.errors import EngineRejected
from slime.engine.http.key import KEY_VARIABLE, engine_key
from slime.engine.http.pool import EnginePool
from slime.errors import UserError
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.trajectory import generate_and_rm_group
from tests.engine.conftest import EngineProcess

KEY = "open-sesame"
ONE_TOKEN = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def locked(qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    running = EngineProcess(qwen3_folder, tmp_path_factory.mktemp("locked") / "log", "--api-key", KEY)
    yield running
    assert running.stop() == 0


@pytest.fixture
def config(locked: EngineProcess, qwen3_folder: Path) -> Config:
    address = f"127.0.0.1:{locked.port}"
    settings = {"rollout_batch_size": 1, "num_rollout": 1, "rollout_external_engine_addrs": [address]}
    return derive(Config(hf_checkpoint=str(qwen3_folder), **settings))


def test_an_engine_that_wants_a_key_says_where_to_put_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"wants an API key: put it into the environment variable {KEY_VARIABLE}$"):
        ExternalEngines(config).start()
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(UserError, match=f"takes another API key than the environment variable {KEY_VARIABLE}$"):
        ExternalEngines(config).start()


def test_a_run_and_its_plugins_reach_engines_with_a_key(
    config: Config, locked: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert ExternalEngines(config).start() == [locked.url]
    assert probe(locked.url, api_key=KEY).returns_log_probs
    assert ask_load(locked.url, KEY) == Load(0, 0, 0)

    async def as_a_plugin_does(address: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{address}/generate", json=ONE_TOKEN) as got,
        ):
            return got.status

    async def without_a_key() -> None:
        pool = EnginePool([locked.url])
        try:
            await pool.clients[0].get_weight_version()
        finally:
            await pool.aclose()

    with RolloutRuntime(config, [locked.url], dispatch=generate_and_rm_group) as runtime:
        assert len(runtime.run(runtime.pool.generate(ONE_TOKEN))["output_ids"]) == 1
        assert runtime.run(runtime.pool.clients[0].get_weight_version()) == "default"
        router = f"{runtime.args.sglang_router_ip}:{runtime.args.sglang_router_port}"
        assert runtime.run(as_a_plugin_does(router)) == 200
        assert runtime.run(as_a_plugin_does(locked.url.removeprefix("http://"))) == 401
        with pytest.raises(EngineRejected, match="401"):
            runtime.run(without_a_key())
        assert KEY not in json.dumps(runtime.args.to_dict(), default=str)


def test_the_key_is_for_engines_of_others_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert engine_key(config) == KEY
    assert engine_key(config.replace(rollout_external_engine_addrs=None)) is None
    with pytest.raises(UserError, match="takes no engines with a key"):
        choose_router(config.replace(rollout_router="sglang"), "external")
