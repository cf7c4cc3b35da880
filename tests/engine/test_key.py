"""Engines that require a key: the run sends it to its engines and to no other address."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime.config import Config, derive
from slime.engine.embedded.__main__ import control_key, with_environment_keys
from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.server import EngineServer
from slime.engine.embedded.options import parse_options
from slime.engine.fleet.engines import Engines
from slime.engine.fleet.external import ExternalEngines, probe
from slime.engine.fleet.status import EngineLoad, request_load
from slime.engine.http.blocking import CONTROL_KEY_VARIABLE, KEY_VARIABLE, engine_key, key_variable, made_key
from slime.engine.http.errors import EngineRejected
from slime.engine.http.pool import EnginePool
from slime.errors import UserError
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import generate_and_rm_group
from slime.utils.http_utils import post
from tests.engine.conftest import EngineProcess
from tests.engine.pids import pids_of

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


def test_missing_or_wrong_key_error_names_the_environment_variable(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"wants an API key: put it into the environment variable {KEY_VARIABLE}$"):
        ExternalEngines(config).start()
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(UserError, match=f"takes another API key than the environment variable {KEY_VARIABLE}$"):
        ExternalEngines(config).start()


def test_run_and_plugins_reach_engines_that_require_a_key(
    config: Config, locked: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert ExternalEngines(config).start() == [locked.url]
    assert probe(locked.url, api_key=KEY).returns_log_probs
    assert request_load(locked.url, KEY) == EngineLoad(0, 0, 0)

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


def test_environment_key_applies_to_external_engines_only(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert engine_key(config) == KEY
    assert engine_key(config.replace(rollout_external_engine_addrs=None)) is None


def test_made_keys_are_unique_and_key_variable_follows_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    made = {made_key() for _ in range(2)}
    assert len(made) == 2
    assert all(len(key) >= 32 for key in made)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert made_key() == KEY
    for address in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert key_variable(address) == CONTROL_KEY_VARIABLE
    for address in ("0.0.0.0", "::", "", "10.0.0.2", "fd00::1", "gpu1"):
        assert key_variable(address) == KEY_VARIABLE


def test_loopback_generation_is_open_and_control_requires_a_key(engine: EngineProcess) -> None:
    def status(path: str, body: Any = None, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        answered = connection.getresponse().status
        connection.close()
        return answered

    app = EngineServer(EngineBridge(EngineCore(parse_options(["--model-path", "m"]), on_death=print))).app
    control = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    is_open = {path for method, path in control if method == "GET"} | {"/generate", "/v1/completions"}
    is_open = (is_open | {"/v1/chat/completions", "/get_weight_version"}) - {"/flush_cache"}
    json_type = {"Content_Type": "application/json"}
    version = engine.get("/server_info")[1]["weight_version"]
    for method, path in control:
        body = None if method in ("GET", "HEAD") else {}
        if path not in is_open:
            assert status(path, body, **json_type) == 401, path
            assert status(path, body, **json_type, Authorization="Bearer wrong") == 401, path
        else:
            assert status(path, body, **json_type) in (200, 400), path
    assert len(control) - len(is_open) > 10
    key = f"Bearer {engine.key}"
    assert status("/flush_cache", {}, **json_type, Authorization=key) == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert status("/generate", ONE_TOKEN, Content_Type=kind) == 415
        assert status("/flush_cache", {}, Content_Type=kind, Authorization=key) == 415
    for host in (
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[",
        "x@[::1",
        "",
    ):
        assert status("/generate", ONE_TOKEN, Host=host, **json_type) == 403, host
        assert status("/server_info", Host=host) == 403, host
    for host in ("localhost:5", "LOCALHOST.", "127.0.0.1", "[::1]:7", "10.1.2.3", "a.localhost"):
        assert status("/generate", ONE_TOKEN, Host=host, **json_type) == 200, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://127.0.0.1:{engine.port}.evil.example"):
        assert status("/generate", ONE_TOKEN, Origin=origin, **json_type) == 403, origin
    assert status("/generate", ONE_TOKEN, Origin=f"http://127.0.0.1:{engine.port}", **json_type) == 200
    shown = {"Host": "gpu1.cluster", "Origin": "http://evil.example", "Authorization": key}
    assert status("/generate", ONE_TOKEN, **shown, **json_type) == 200  # with the key any host and origin is accepted
    assert engine.get("/server_info")[1]["weight_version"] == version
    assert engine.key not in json.dumps(engine.get("/server_info")[1])


def test_served_engine_stores_its_key_in_a_file_for_attached_runs(
    qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (KEY_VARIABLE, CONTROL_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = with_environment_keys(parse_options(["--model-path", "m"]))
    settings = {"rollout_batch_size": 1, "num_rollout": 1}
    attached = derive(
        Config(
            hf_checkpoint=str(qwen3_folder), rollout_external_engine_addrs=["127.0.0.1:7", "localhost:8"], **settings
        )
    )
    assert engine_key(attached) is None
    with control_key(options, 7) as keyed:
        file = tmp_path / "slime" / "engine_keys" / "7"
        assert keyed.admin_api_key is not None
        assert keyed.api_key is None
        assert file.read_text().strip() == keyed.admin_api_key == engine_key(attached)
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        elsewhere = attached.replace(rollout_external_engine_addrs=["10.0.0.1:7"])
        assert engine_key(elsewhere) is None  # an engine on another machine never gets it
        mixed = attached.replace(rollout_external_engine_addrs=["10.0.0.1:7", "127.0.0.1:7"])
        with pytest.raises(
            UserError, match=r"127\.0\.0\.1:7 .* not for 10\.0\.0\.1:7: start all of them with the same"
        ):
            engine_key(mixed)
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        assert engine_key(mixed) == KEY
        monkeypatch.delenv(KEY_VARIABLE)
        with (
            control_key(options, 8),
            pytest.raises(UserError, match=r"127\.0\.0\.1:7 and localhost:8 have different keys: start all"),
        ):
            engine_key(attached)
    assert not list(file.parent.iterdir())
    (tmp_path / "no_folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_folder"))
    with (
        pytest.raises(UserError, match=r"cannot be stored in .*/7 \(Not a directory\): set XDG_CACHE_HOME"),
        control_key(options, 7),
    ):
        raise AssertionError("an engine without a key would be open")


def test_engines_beyond_loopback_require_the_key_of_the_run(
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
        words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids_of(engines)]
        assert not any(engines.key.encode() in line for line in words)  # command lines are readable by other users
        with RolloutRuntime(config, engines.urls, dispatch=generate_and_rm_group, **engines.addresses()) as runtime:
            [client] = runtime.pool.clients
            assert runtime.run(client.get_weight_version()) == "default"
            router = f"http://{runtime.args.sglang_router_ip}:{runtime.args.sglang_router_port}"
            assert router.startswith("http://127.0.0.1:")
            assert runtime.run(post(router)) == 200
            assert runtime.run(post(router, Authorization="Bearer EMPTY")) == 200  # as OpenAI clients do
            assert runtime.run(post(engines.urls[0])) == 401
            assert runtime.run(post(engines.urls[0], Authorization=f"Bearer {engines.key}")) == 200
            assert runtime.router_address == (None, False, engines.key)


def test_plugin_posts_send_the_run_key_to_the_engine_url_only(engine: EngineProcess, qwen3_folder: Path) -> None:
    config = derive(Config(hf_checkpoint=str(qwen3_folder), rollout_batch_size=1, num_rollout=1))
    with pytest.raises(EngineRejected, match="401"):
        asyncio.run(post(f"{engine.url}/abort_request", {"abort_all": True}))
    shown = {"api_key": engine.key, "is_open": True}
    with RolloutRuntime(config, [engine.url], dispatch=generate_and_rm_group, **shown) as runtime:
        assert runtime.args.sglang_router_port == engine.port  # plugins post to the engine directly
        assert runtime.run(post(f"{engine.url}/abort_request", {"abort_all": True}))["success"] is True
        with pytest.raises(EngineRejected, match="401"):
            runtime.run(post(f"http://localhost:{engine.port}/abort_request", {"abort_all": True}))


def test_engine_on_a_public_address_always_has_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def key_of(*words: str) -> str | None:
        return with_environment_keys(parse_options(["--model-path", "m", *words])).api_key

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert key_of() is None
    assert key_of("--host", "0.0.0.0", "--api-key", KEY) == KEY
    assert capsys.readouterr().out == ""
    made = key_of("--host", "10.0.0.2")
    assert made is not None
    assert f"requires the key {made} " in capsys.readouterr().out
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert key_of("--host", "0.0.0.0") == KEY
    assert KEY_VARIABLE not in os.environ  # child processes must not see it
