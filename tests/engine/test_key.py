"""Engines that ask for a key, of others and of the run: the run shows it to them, and to nobody else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from slime.config import Config, derive
from slime.engine.embedded.__main__ import with_key
from slime.engine.embedded.options import parse_options
from slime.engine.fleet.capabilities import probe
from slime.engine.fleet.engines import Engines
from slime.engine.fleet.external import ExternalEngines
from slime.engine.fleet.states import Load, ask_load
from slime.engine.http.errors import EngineRejected
from slime.engine.http.key import KEY_VARIABLE, engine_key, made_key
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


def test_the_key_of_the_environment_is_for_engines_of_others(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert engine_key(config) == KEY
    assert engine_key(config.replace(rollout_external_engine_addrs=None)) is None


def test_engines_beyond_loopback_have_a_key_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert made_key(["127.0.0.1", "127.0.0.2", "::1", "localhost"]) is None
    for address in ("0.0.0.0", "::", "", "10.0.0.2", "fd00::1", "gpu1"):
        made = [made_key(["127.0.0.1", address]) for _ in range(2)]
        assert len({str(key) for key in made if key is not None and len(key) >= 32}) == 2
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert (made_key(["10.0.0.2"]), made_key(["127.0.0.1"])) == (KEY, None)


def test_a_run_asks_its_engines_beyond_loopback_with_its_key(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    settings = {"rollout_batch_size": 1, "num_rollout": 1, "rollout_num_gpus": 1, "host": "0.0.0.0"}
    config = derive(Config(hf_checkpoint=str(qwen3_folder), **settings))

    async def post(address: str, **headers: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{address}/generate", json=ONE_TOKEN, headers=headers) as got,
        ):
            return got.status

    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        assert engines.key is not None
        words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in engines.pids()]
        assert not any(engines.key.encode() in line for line in words)  # which others on the machine can read
        with RolloutRuntime(config, engines.urls, dispatch=generate_and_rm_group, **engines.addresses()) as runtime:
            [client] = runtime.pool.clients
            assert runtime.run(client.get_weight_version()) == "default"
            router = f"http://{runtime.args.sglang_router_ip}:{runtime.args.sglang_router_port}"
            assert router.startswith("http://127.0.0.1:")
            assert runtime.run(post(router)) == 200
            assert runtime.run(post(router, Authorization="Bearer EMPTY")) == 200  # as programs for OpenAI's API do
            assert runtime.run(post(engines.urls[0])) == 401
            assert runtime.run(post(engines.urls[0], Authorization=f"Bearer {engines.key}")) == 200
            assert runtime.router_address == (None, False, engines.key)


def test_an_engine_that_others_can_reach_never_goes_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def key_of(*words: str) -> str | None:
        return with_key(parse_options(["--model-path", "m", *words])).api_key

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert key_of() is None
    assert key_of("--host", "0.0.0.0", "--api-key", KEY) == KEY
    assert capsys.readouterr().out == ""
    made = key_of("--host", "10.0.0.2")
    assert made is not None
    assert f"asks for the key {made} " in capsys.readouterr().out
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert key_of("--host", "0.0.0.0") == KEY
    assert KEY_VARIABLE not in os.environ  # what the engine starts need not know it
