"""SGLang servers and routers as processes: command lines, flags, probes and attaching, with stub packages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.cluster.node import Slot
from slime.config import Config
from slime.engine.fleet.backend import choose_backend, choose_router, installed_sglang
from slime.engine.fleet.engines import Engines, check_engines, count_engines
from slime.engine.fleet.external import Capabilities, ExternalEngines, drop_unsupported, probe
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.blocking import KEY_VARIABLE, NoResponse, ask
from slime.engine.sglang.installed import SGLANG, find_installed, installed_version
from slime.engine.sglang.router import RoutedPool, RouterDied
from slime.errors import RunFailed, UserError
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import generate_and_rm_group
from slime.utils.http_utils import get_model_url
from tests.cluster.nodes import FarNode
from tests.engine.fake_packages import write_packages
from tests.engine.pids import pids_of
from tests.tiny_models import make_tokenizer


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs both stub packages with an empty options cache."""
    monkeypatch.setenv("PYTHONPATH", str(write_packages(tmp_path / "packages")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 320}))
    return str(folder)


def config_for(model: str, **flags: Any) -> Config:
    return Config(hf_checkpoint=model, **{"rollout_num_gpus": 1, "rollout_backend": "sglang", "device": "cpu", **flags})


def report(run_dir: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "logs" / f"{name}.log").read_text().splitlines()[0])
    return found


def options(argv: list[str]) -> dict[str, str]:
    """Flags with their values; switches have an empty value."""
    found: dict[str, str] = {}
    for word in argv:
        if word.startswith("--"):
            last, _, value = word[2:].partition("=")
            found[last] = value
        else:
            found[last] = f"{found[last]} {word}".strip()
    return found


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_options_of_an_installed_version_are_cached(tmp_path: Path) -> None:
    installed = find_installed(SGLANG)
    assert installed is not None
    assert (str(installed), installed.python) == ("sglang 9.9.9", sys.executable)
    assert installed.options["enable-metrics"].is_switch
    assert installed.options["attention-backend"].choices == ("torch_native", "triton")
    kept = tmp_path / "cache" / "slime" / "sglang-9.9.9-options.json"
    kept.write_text(json.dumps({"kept": {"is_switch": True, "choices": None}}))
    again = find_installed(SGLANG, sys.executable)
    assert again is not None
    assert list(again.options) == ["kept"]


def test_chooses_backend_and_router_and_gives_a_reason(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = config_for(model, rollout_backend="auto")
    assert choose_backend(auto, "cuda") == ("sglang", "SGLang 9.9.9 is installed")
    assert choose_backend(auto, "cpu") == ("embedded", "there is no GPU for SGLang")
    assert choose_backend(config_for(model), "cpu") == ("sglang", "SGLang 9.9.9 was asked for")
    external = config_for(model, rollout_external_engine_addrs=["h:1"])
    assert choose_backend(external, "cpu")[0] == "external"
    assert choose_router(auto, "sglang") == ("sglang", "sglang-router 9.9.9 is installed")
    assert choose_router(auto, "embedded") == ("builtin", "it takes embedded engines")
    with pytest.raises(UserError, match="--rollout-router sglang is for SGLang engines"):
        choose_router(auto.replace(rollout_router="sglang"), "embedded")
    monkeypatch.setenv("PYTHONPATH", "")
    assert installed_version(SGLANG) is None
    assert choose_backend(auto, "cuda") == ("embedded", "SGLang is not installed")
    assert choose_router(auto, "sglang") == ("builtin", "sglang-router is not installed")
    with pytest.raises(UserError, match="sglang-router is not installed in this interpreter; pip install"):
        choose_router(auto.replace(rollout_router="sglang"), "sglang")
    with pytest.raises(UserError, match="SGLang is not installed in this interpreter"):
        installed_sglang(auto)


def test_server_command_line_has_the_configured_flags(model: str, tmp_path: Path) -> None:
    carried = {"sglang_enable_metrics": True, "sglang_cuda_graph_bs": [1, 2], "sglang_max_total_tokens": 99}
    config = config_for(model, carried=carried, rollout_num_gpus=2, seed=5, log_level="warning")
    with EngineFleet(config, device="cpu", run_dir=tmp_path, model_path=model) as fleet:
        ports = [url.rpartition(":")[2] for url in fleet.urls]
        told = [report(tmp_path, f"engine-{index}") for index in (0, 1)]
    written = [options(one["argv"]) for one in told]
    assert [one.pop("port") for one in written] == ports
    assert len({one.pop("nccl-port") for one in written}) == 2
    assert {one.pop("api-key") for one in written} == {fleet.key}
    assert [one.pop("random-seed") for one in written] == ["5", "6"]
    assert written[0] == written[1] == {
        "model-path": model, "host": "127.0.0.1", "device": "cpu", "dtype": "float32", "tp-size": "1", "base-gpu-id": "0",
        "log-level": "warning", "attention-backend": "torch_native", "mem-fraction-static": "0.1",
        "max-total-tokens": "99", "max-running-requests": "64", "sleep-on-idle": "", "disable-overlap-schedule": "",
        "enable-metrics": "", "cuda-graph-bs": "1 2",
    }  # fmt: skip
    assert told[0]["env"]["SGLANG_USE_CPU_ENGINE"] == "1"


def test_keys_and_values_may_begin_with_a_dash(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "-key-of-mine")
    config = config_for(model, carried={"sglang_context_length": "-9"}, rollout_router="sglang")
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        server, router = (options(report(tmp_path, name)["argv"]) for name in ("engine-0", "router"))
        assert (server["api-key"], server["context-length"]) == ("-key-of-mine", "-9")
        assert router["api-key"] == engines.key == "-key-of-mine"


def test_servers_get_their_gpus_and_parallel_sizes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "10,11,12,13,14,15")
    config = config_for(
        model, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, actor_num_gpus_per_node=2, offload_rollout=True,
        carried={"sglang_pp_size": 2}, trust_remote_code=True,
    )  # fmt: skip
    with EngineFleet(config, device="cuda", run_dir=tmp_path, model_path=model):
        told = [report(tmp_path, f"engine-{index}") for index in (0, 1)]
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in told] == ["12,13", "14,15"]
    written = options(told[0]["argv"])
    assert (written["tp-size"], written["pp-size"], written["dtype"]) == ("1", "2", "bfloat16")
    assert {"enable-memory-saver", "trust-remote-code"} <= set(written)
    assert not {"sleep-on-idle", "attention-backend", "max-total-tokens"} & set(written)


def test_two_node_engine_runs_one_server_per_node(model: str, tmp_path: Path) -> None:
    near, far = FarNode("127.0.0.2", root="/near"), FarNode("127.0.0.3")
    slots = [Slot(node, str(device)) for node in (near, far) for device in (4, 5)]
    config = config_for(model, rollout_num_gpus=4, rollout_num_gpus_per_engine=4)
    logs = [tmp_path / "logs" / f"{name}.log" for name in ("engine-0", "engine-0-node-1")]

    def starts() -> list[int]:
        return [len(log.read_text().splitlines()) for log in logs]

    with EngineFleet(config, device="cuda", run_dir=tmp_path, model_path=model, slots=slots) as fleet:
        assert wait_until(lambda: starts() == [1, 1])  # the second server may start later
        told = [report(tmp_path, name) for name in ("engine-0", "engine-0-node-1")]
        first, second = (options(one["argv"]) for one in told)
        assert fleet.urls == [f"http://127.0.0.2:{first['port']}"]
        assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in told] == ["4,5", "4,5"]
        assert (first["host"], second["host"]) == ("127.0.0.2", "127.0.0.3")
        assert (first["model-path"], second["model-path"]) == (f"/near{model}", model)
        assert first["dist-init-addr"] == second["dist-init-addr"]
        assert first["dist-init-addr"].startswith("127.0.0.2:")
        assert [(one["tp-size"], one["nnodes"], one["node-rank"]) for one in (first, second)] == [
            ("4", "2", "0"), ("4", "2", "1"),
        ]  # fmt: skip
        assert not {"nccl-port"} & set(first) | set(second) - set(first)
        assert len(pids_of(fleet)) == 6
        os.kill(pids_of(fleet)[-1], signal.SIGKILL)
        assert wait_until(lambda: fleet.why_ended(0) is not None)
        assert "engine-0-node-1 was killed by signal 9" in str(fleet.why_ended(0))
        fleet.restart(0)  # restarts both of its servers
        assert fleet.why_ended(0) is None
        assert wait_until(lambda: starts() == [2, 2])
    uneven = [Slot(near, "0"), *(Slot(far, str(device)) for device in range(3))]
    with pytest.raises(
        UserError, match=r"per-engine 4: SGLang needs .* 1 on node 127\.0\.0\.2, 3 on node 127\.0\.0\.3"
    ):
        EngineFleet(config, device="cuda", run_dir=tmp_path, model_path=model, slots=uneven).start()


@pytest.mark.parametrize(
    ("carried", "sentence"),
    [
        ({"sglang_contxt_length": 9}, "sglang 9.9.9 has no option --contxt-length: did you mean --sglang-context-length?"),
        ({"sglang_tp_size": 2}, "--sglang-tp-size is decided by --rollout-num-gpus-per-engine: drop it"),
        ({"sglang_api_key": "x"}, "--sglang-api-key is decided by the environment variable SLIME_ENGINE_API_KEY: drop it"),
        ({"sglang_enable_metrics": 3}, "--sglang-enable-metrics is a switch of sglang 9.9.9 and takes no value, not 3"),
        ({"sglang_attention_backend": "x"}, "--sglang-attention-backend must be one of torch_native, triton"),
        ({"sglang_pp_size": 2}, "--sglang-pp-size 2 does not divide the 1 GPUs of an engine"),
        ({"router_polcy": "x"}, "sglang-router 9.9.9 has no option --polcy: did you mean --router-policy?"),
        ({"router_policy": "x"}, "--router-policy must be one of round_robin, cache_aware"),
        ({"sglang_router_ip": "h"}, "--sglang-router-ip needs --sglang-router-port"),
    ],
)  # fmt: skip
def test_rejects_invalid_sglang_and_router_flags(model: str, carried: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check_engines(config_for(model, carried=carried), "sglang", "cpu")
    assert sentence in str(caught.value)


def test_router_gets_flags_and_workers_and_its_death_is_reported(model: str, tmp_path: Path) -> None:
    config = config_for(model, rollout_num_gpus=2, carried={"router_policy": "round_robin"})
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        router = options(report(tmp_path, "router")["argv"])
        assert engines.router_url == f"http://127.0.0.1:{router['port']}"
        assert (router["policy"], router["prometheus-host"]) == ("round_robin", "127.0.0.1")
        assert "pd-disaggregation" not in router
        assert "disable-circuit-breaker" in router
        workers = ask("GET", f"{engines.router_url}/workers")[1]["workers"]
        assert [(one["url"], one["worker_type"]) for one in workers] == [(url, "regular") for url in engines.urls]
        assert engines.model_urls == {"default": [engines.router_url]}
        assert (engines.kind, len(pids_of(engines))) == ("sglang", 9)
        [only] = engines._routers.values()
        only.remove_worker(engines.urls[0])
        assert [one["url"] for one in only.workers()] == engines.urls[1:]
        engines.check()
        with pytest.raises(NoResponse):
            ask("GET", f"{engines.router_url}/die")
        assert wait_until(lambda: len(pids_of(engines)) == 6)
        with pytest.raises(RouterDied, match=r"(?s)router ended with code 3.*the router broke"):
            engines.check()
    assert pids_of(engines) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_run_key_reaches_servers_and_router_but_no_command_line(model: str, tmp_path: Path, host: str) -> None:
    config = config_for(model, host=host)
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        told = [report(tmp_path, name) for name in ("engine-0", "router")]
        assert [options(one["argv"])["api-key"] for one in told] == [engines.key, engines.key]
        assert KEY_VARIABLE not in told[0]["env"]  # child processes of the server must not see it
        assert [one["api_key"] for one in ask("GET", f"{engines.router_url}/workers")[1]["workers"]] == [engines.key]
        words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids_of(engines)]
        assert sum(b"launch_" in line for line in words) >= 2
        assert not any(engines.key.encode() in line for line in words)
        logs = list((tmp_path / "logs").iterdir())
        assert {log.stat().st_mode & 0o777 for log in logs if engines.key in log.read_text()} == {0o600}
        with RolloutRuntime(config, engines.urls, dispatch=generate_and_rm_group, **engines.addresses()) as runtime:
            own = f"http://127.0.0.1:{runtime.args.sglang_router_port}"  # plugins need no key at this address
            assert ask("GET", f"{own}/workers")[1] == {"workers": [{"id": "0", "url": engines.urls[0]}]}


def test_restarted_server_rejoins_its_router_at_the_same_address(model: str, tmp_path: Path) -> None:
    with Engines(config_for(model, rollout_num_gpus=2), device="cpu", run_dir=tmp_path) as engines:
        urls = engines.urls
        assert engines.why_ended(0) is None
        os.kill(pids_of(engines)[2], signal.SIGKILL)  # pids 0 and 1 are the guard of engine-0 and its deputy
        assert wait_until(lambda: engines.why_ended(0) is not None)
        assert "engine-0 was killed by signal 9" in str(engines.why_ended(0))
        assert engines.own_fleet is not None
        engines.route(urls[0], False)
        engines.own_fleet.restart(0)
        engines.route(urls[0], True)
        engines.check()
        assert engines.urls == urls
        assert ask("GET", f"{urls[0]}/health")[0] == 200
        workers = ask("GET", f"{engines.router_url}/workers")[1]["workers"]
        assert [one["url"] for one in workers] == [urls[1], urls[0]]


def test_prefill_and_decode_servers_register_with_the_router(model: str, tmp_path: Path) -> None:
    carried = {"router_cb_failure_threshold": "5"}
    config = config_for(model, rollout_num_gpus=3, prefill_num_servers=1, carried=carried)
    assert count_engines(config, "sglang") == 3
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        prefill, decode = (options(report(tmp_path, f"engine-{index}")["argv"]) for index in (0, 1))
        workers = ask("GET", f"{engines.router_url}/workers")[1]["workers"]
        router = options(report(tmp_path, "router")["argv"])
        assert "pd-disaggregation" in router
        assert ("disable-circuit-breaker" in router, router["cb-failure-threshold"]) == (False, "5")
    assert (prefill["disaggregation-mode"], prefill["load-balance-method"]) == ("prefill", "follow_bootstrap_room")
    assert decode["disaggregation-mode"] == "decode"
    assert "disaggregation-bootstrap-port" not in decode
    assert [one["worker_type"] for one in workers] == ["prefill", "decode", "decode"]
    assert str(workers[0]["bootstrap_port"]) == prefill["disaggregation-bootstrap-port"]
    assert "bootstrap_port" not in workers[1]
    with pytest.raises(UserError, match="prefill and decode servers need sglang-router"):
        Engines(config.replace(rollout_router="builtin"), device="cpu", run_dir=tmp_path)


def test_frozen_model_has_its_own_servers_and_address(model: str, tmp_path: Path) -> None:
    models = [
        {"name": "judge", "model_path": str(tmp_path / "judge"), "server_groups": [{"num_gpus": 2}]},
        {"name": "actor", "server_groups": [{"num_gpus": 1, "overrides": {"context_length": 77}}]},
    ]
    file = tmp_path / "sglang.yaml"
    file.write_text(yaml.safe_dump({"sglang": models}))
    config = config_for(model, rollout_num_gpus=3, sglang_config=str(file), rollout_router="builtin")
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        assert len(engines.urls) == 1
        assert engines.size == 3
        assert options(report(tmp_path, "engine-0")["argv"])["context-length"] == "77"
        assert options(report(tmp_path, "judge-0")["argv"])["model-path"] == str(tmp_path / "judge")
        with RolloutRuntime(config, engines.urls, dispatch=generate_and_rm_group, **engines.addresses()) as runtime:
            actor, judge = (get_model_url(runtime.args, name, "") for name in ("actor", "judge"))
            assert get_model_url(runtime.args, "nobody", "/v1/models") == f"{actor}/v1/models"
            for address, urls in ((actor, engines.urls), (judge, engines.model_urls["judge"])):
                workers = [{"id": str(number), "url": url} for number, url in enumerate(urls)]
                assert ask("GET", f"{address}/workers")[1]["workers"] == workers
    file.write_text(
        yaml.safe_dump({"sglang": [{"name": "a", "server_groups": [{"num_gpus": 3, "overrides": {"tpsize": 1}}]}]})
    )
    with pytest.raises(
        UserError, match=r"model a overrides tpsize, which sglang 9\.9\.9 has not: did you mean tp-size\?"
    ):
        Engines(config, device="cpu", run_dir=tmp_path)


def test_flags_fall_back_when_a_server_lacks_a_capability(model: str, tmp_path: Path) -> None:
    config = config_for(model, rollout_router="builtin")
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        [found] = engines.capabilities
    assert found == Capabilities(
        "sglang", "9.9.9", model, frozenset({"abort"}), frozenset({"disk", "tensor"}),
        releases_memory=False, echoes_weight_version=False, returns_log_probs=True, returns_routed_experts=False,
    )  # fmt: skip
    asked = config.replace(update_weight_pause_mode="in_place", update_weight_transport="nccl", offload_rollout=True)
    asked = asked.replace(lora_rank=4, lora_sync="adapter")
    changed, sentences = drop_unsupported(asked, [found, found])
    assert (changed.update_weight_pause_mode, changed.update_weight_transport) == ("abort", "disk")
    assert (changed.offload_rollout, changed.lora_sync) == (False, "merged")
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "SGLang 9.9.9 cannot pause by in_place",
        "SGLang 9.9.9 takes no weights by nccl",
        "SGLang 9.9.9 adds an adapter only in requests that name it",
        "SGLang 9.9.9 cannot release its memory",
        "SGLang 9.9.9 does not name the weight version of an answer",
    ]
    with pytest.raises(RunFailed, match="returns no log-probs"):
        drop_unsupported(config, [Capabilities("sglang", "1", model, returns_log_probs=False)])
    with pytest.raises(UserError, match="start it with --enable-return-routed-experts"):
        drop_unsupported(config.replace(use_rollout_routing_replay=True), [found])


def test_routing_replay_makes_servers_return_routed_experts(model: str, tmp_path: Path) -> None:
    config = config_for(model, rollout_router="builtin", use_rollout_routing_replay=True)
    with Engines(config, device="cpu", run_dir=tmp_path) as engines:
        assert engines.supported_config(config) is not None
        assert "enable-return-routed-experts" in options(report(tmp_path, "engine-0")["argv"])
    with pytest.raises(UserError, match="is decided by --use-rollout-routing-replay: drop it"):
        check_engines(config_for(model, carried={"sglang_enable_return_routed_experts": True}), "sglang", "cpu")
    with pytest.raises(UserError, match="does not support prefill and decode servers"):
        check_engines(config.replace(prefill_num_servers=1, rollout_num_gpus=2), "sglang", "cpu")


def test_external_engines_are_attached_and_left_running(model: str, tmp_path: Path) -> None:
    with EngineFleet(config_for(model, rollout_num_gpus=2), device="cpu", run_dir=tmp_path, model_path=model) as fleet:
        addresses = [url.removeprefix("http://") for url in fleet.urls]
        config = config_for(model, rollout_external_engine_addrs=addresses)
        with Engines(config, device="cpu", run_dir=tmp_path / "run") as engines:
            assert (engines.urls, engines.kind, pids_of(engines)) == (fleet.urls, "sglang", [])
            assert engines.router_url is None
        fleet.check()
        assert probe(fleet.urls[0]).version == "9.9.9"
        other = tmp_path / "other"
        other.mkdir()
        for facts, reason in (
            ({"model_type": "llama", "vocab_size": 320}, "architecture qwen3"),
            ({"model_type": "qwen3", "vocab_size": 7}, "vocabulary 320"),
        ):
            (other / "config.json").write_text(json.dumps(facts))
            with pytest.raises(UserError, match=rf"serves {model} with {reason}, but --hf-checkpoint {other}"):
                ExternalEngines(config.replace(hf_checkpoint=str(other))).start()
    with pytest.raises(UserError, match=r"--rollout-external-engine-addrs: engine http://.* did not answer"):
        ExternalEngines(config).start()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"rollout_external_engine_addrs": ["nowhere"]}, "nowhere: give HOST:PORT"),
        ({"rollout_external_engine_addrs": ["h:1", "http://h:1/"]}, "names an engine twice"),
        ({"rollout_external_engine_addrs": ["h:1"], "offload_rollout": True}, "--offload-rollout is for engines that the run starts itself"),
    ],
)  # fmt: skip
def test_rejects_invalid_external_engine_flags(model: str, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_engines(config_for(model, **flags), "external", "cpu")


ANSWER = {
    "text": "",
    "output_ids": [1],
    "success": True,
    "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 1, None]]},
}


@pytest.mark.parametrize("ask", ["generate", "sample"])
def test_routed_pool_sends_requests_to_router_and_commands_to_engines(ask: str) -> None:
    from aiohttp import web

    seen: list[tuple[str, str, str | None]] = []

    def app(name: str) -> web.Application:
        async def handle(request: web.Request) -> web.Response:
            seen.append((name, request.path, request.headers.get("X-SMG-Routing-Key")))
            return web.json_response(ANSWER)

        made = web.Application()
        made.router.add_route("*", "/{rest:.*}", handle)
        return made

    async def scenario() -> None:
        urls = []
        runners = [web.AppRunner(app(name)) for name in ("router", "engine-0", "engine-1")]
        for runner in runners:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        pool = RoutedPool(urls[1:], urls[0])
        generate = getattr(pool, ask)
        await generate({}, 7)
        await generate({})
        await generate({"sampling_params": {"logit_bias": {"1": 2.0}}})  # the router drops this field
        await getattr(RoutedPool(urls[1:], urls[0], router_only=True), ask)({"unknown": 1})
        async with pool.open("POST", "/v1/chat/completions", "session") as response:
            assert response.status == 200
        await pool.broadcast("pause")
        await pool.aclose()
        for runner in runners:
            await runner.cleanup()

    asyncio.run(scenario())
    assert seen[:5] == [
        ("router", "/generate", "7"),
        ("router", "/generate", None),
        ("engine-0", "/generate", None),
        ("router", "/generate", None),
        ("router", "/v1/chat/completions", "session"),
    ]
    assert sorted(seen[5:]) == [(f"engine-{index}", "/pause_generation", None) for index in (0, 1)]
