"""Fleet tests with real processes that implement only the start-up of an engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime.cluster.devices import cpu_cores
from slime.cluster.local import LocalNode
from slime.cluster.node import Slot, SlotPlacement
from slime.config import Config
from slime.driver.components import with_fault_tolerance_across_nodes
from slime.engine.embedded.options import parse_options
from slime.engine.fleet.engines import Engines
from slime.engine.fleet.processes import EngineDied, EngineFleet, EngineRetired, EngineStartTimeout
from slime.engine.fleet.supervisor import HealthCheckSettings, Supervisor
from slime.engine.http.pool import EnginePool
from slime.engine.launch import Launch, PortAllocator
from slime.errors import RunFailed, UserError
from slime.rollout.event_loop import LoopThread
from tests.cluster.nodes import FarNode
from tests.engine.pids import pids_of

STUB = (sys.executable, str(Path(__file__).with_name("stub_engine.py")))


def make_fleet(
    tmp_path: Path,
    behaviour: str,
    device: str = "cpu",
    slots: Sequence[Slot] | None = None,
    spare: Callable[[Slot], Slot | None] | None = None,
    key: str | None = None,
    **flags: Any,
) -> EngineFleet:
    config = Config(hf_checkpoint="unused", **{"rollout_num_gpus": 1, **flags})
    folder = tmp_path / behaviour
    return EngineFleet(
        config, device=device, run_dir=tmp_path, model_path=folder, launcher=STUB, slots=slots, spare=spare, key=key
    )


def report(tmp_path: Path, name: str) -> dict[str, Any]:
    """Return the stub's report of its start: argv and environment."""
    result: dict[str, Any] = json.loads((tmp_path / "logs" / f"{name}.log").read_text().splitlines()[0])
    return result


def test_engines_start_become_healthy_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fleet = make_fleet(tmp_path, "slow", rollout_num_gpus=2, log_level="warning")
    with fleet:
        assert len(fleet.urls) == len(set(fleet.urls)) == 2
        assert all(url.startswith("http://127.0.0.1:") for url in fleet.urls)
        fleet.check()
        pids = pids_of(fleet)
        assert len(pids) == 6  # two guards, their deputies, two engines
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    fleet.stop()
    for index in range(2):
        told = report(tmp_path, f"engine-{index}")
        options = parse_options(told["argv"])
        assert f"http://{options.host}:{options.port}" == fleet.urls[index]
        assert options.model_path == str(tmp_path / "slow")
        assert (options.device, options.dtype, options.log_level) == ("cpu", "float32", "warning")
        assert options.compile is None
        assert told["env"]["OMP_NUM_THREADS"] == str(max(1, cpu_cores() // 2))


def test_engine_flags_reach_the_engine_process(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "rollout_dtype": "bfloat16", "engine_max_total_tokens": 4096, "engine_max_running_requests": 9,
        "engine_chunked_prefill_size": 128, "engine_mem_fraction": 0.5, "rollout_compile": True,
        "trust_remote_code": True,
    }  # fmt: skip
    with make_fleet(tmp_path, "fine", **flags):
        options = parse_options(report(tmp_path, "engine-0")["argv"])
    assert options.dtype == "bfloat16"
    assert options.max_total_tokens == 4096
    assert options.max_running_requests == 9
    assert options.chunked_prefill_size == 128
    assert options.mem_fraction == 0.5
    assert options.compile is True
    assert options.trust_remote_code is True


def test_engines_get_only_the_secrets_that_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hub")
    monkeypatch.setenv("OPENAI_API_KEY", "judge")
    with make_fleet(tmp_path, "good", pass_env=["HF_TOKEN"]):
        environment = report(tmp_path, "engine-0")["env"]
    assert environment["HF_TOKEN"] == "hub"
    assert "OPENAI_API_KEY" not in environment


def test_user_error_of_an_engine_is_raised_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_fleet(tmp_path, "mistake", rollout_num_gpus=2).start()
    assert str(caught.value) == "the folder mistake has no config.json: give a model folder"


def test_engine_crash_at_start_includes_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match=r"(?s)engine-0 exited with code 1.*something broke") as caught:
        make_fleet(tmp_path, "crash").start()
    assert (caught.value.name, caught.value.exit_code) == ("engine-0", 1)


def test_engine_that_never_answers_times_out(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, "hang", engine_start_timeout=0.5)
    with pytest.raises(EngineStartTimeout, match=r"engine-0 did not answer /health .*0\.5 s"):
        fleet.start()
    assert pids_of(fleet) == []


def check_for(fleet: EngineFleet, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        fleet.check()
        time.sleep(0.02)


def test_check_raises_after_an_engine_dies(tmp_path: Path) -> None:
    with make_fleet(tmp_path, "fine", rollout_num_gpus=2) as fleet:
        os.kill(pids_of(fleet)[-1], signal.SIGKILL)
        with pytest.raises(EngineDied, match="engine-1 was killed by signal 9"):
            check_for(fleet, 120)


def test_engine_that_dies_after_its_first_health_check_is_named(tmp_path: Path) -> None:
    engines = Engines(Config(hf_checkpoint="unused", rollout_num_gpus=1), device="cpu", run_dir=tmp_path)
    engines._fleets[engines.models[0].name] = fleet = make_fleet(tmp_path, "mayfly")
    with pytest.raises(EngineDied, match="engine-0 was killed by signal 9"):
        engines.start()
    assert pids_of(fleet) == []


def test_port_in_use_is_a_user_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--engine-port"):
            make_fleet(tmp_path, "fine", engine_port=port).start()


def test_rejects_sglang_flags_without_a_usable_sglang(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SGLang is not installed in this interpreter; install it with"):
        make_fleet(tmp_path, "fine", rollout_backend="sglang")
    with pytest.raises(UserError, match=r"/nowhere/python is not a Python interpreter"):
        make_fleet(tmp_path, "fine", rollout_backend="sglang", sglang_python="/nowhere/python")
    with pytest.raises(UserError, match="--prefill-num-servers is about SGLang servers"):
        make_fleet(tmp_path, "fine", rollout_num_gpus=2, prefill_num_servers=1)
    for flag, known in (("tool-call-parser", "deepseekv3, .*hermes"), ("reasoning-parser", "deepseek-r1, .*qwen3")):
        with pytest.raises(UserError, match=rf"--sglang-{flag} inkling: the embedded engine knows {known}"):
            make_fleet(tmp_path, "fine", carried={f"sglang_{flag.replace('-', '_')}": "inkling"})


def test_no_engine_or_several_gpus_per_engine_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there would be no engine"):
        make_fleet(tmp_path, "fine", rollout_num_gpus=1, rollout_num_gpus_per_engine=2)
    with pytest.raises(UserError, match="runs on one GPU"):
        make_fleet(tmp_path, "fine", device="cuda", rollout_num_gpus=2, rollout_num_gpus_per_engine=2)


@pytest.mark.parametrize(("colocate", "expected"), [(True, ["4", "5"]), (False, ["6", "7"])])
def test_engines_get_their_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colocate: bool, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    flags = {"colocate": colocate, "rollout_num_gpus": 2, "actor_num_gpus_per_node": 2}
    with make_fleet(tmp_path, "fine", device="cuda", **flags):
        told = [report(tmp_path, f"engine-{index}") for index in range(2)]
    assert [entry["env"]["CUDA_VISIBLE_DEVICES"] for entry in told] == expected
    assert all("bfloat16" in entry["argv"] for entry in told)


def test_too_few_gpus_are_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="GPU number 1 is needed but only 1 are visible"):
        make_fleet(tmp_path, "fine", device="cuda", rollout_num_gpus=1, colocate=False).start()


def test_engines_start_on_the_nodes_of_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    far = FarNode("127.0.0.2", cores=12, root="/elsewhere")
    nodes = [LocalNode(), far, far]
    with make_fleet(tmp_path, "fine", rollout_num_gpus=3, slots=[Slot(node) for node in nodes]) as fleet:
        assert [url.rpartition(":")[0] for url in fleet.urls] == [f"http://{node.address}" for node in nodes]
        told = [report(tmp_path, f"engine-{index}") for index in range(3)]
    here = str(tmp_path / "fine")
    assert [parse_options(one["argv"]).model_path for one in told] == [here, f"/elsewhere{here}", f"/elsewhere{here}"]
    assert [one["env"]["OMP_NUM_THREADS"] for one in told] == [str(cpu_cores()), "6", "6"]


def test_engines_get_the_devices_of_their_slots(tmp_path: Path) -> None:
    node = LocalNode()
    with make_fleet(tmp_path, "fine", device="cuda", rollout_num_gpus=2, slots=[Slot(node, "5"), Slot(node, "2")]):
        told = [report(tmp_path, f"engine-{index}") for index in range(2)]
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in told] == ["5", "2"]


def test_node_lost_before_the_start_is_named(tmp_path: Path) -> None:
    node = FarNode("127.0.0.2")
    node.lose()
    fleet = make_fleet(tmp_path, "fine", rollout_num_gpus=2, slots=[Slot(LocalNode()), Slot(node)])
    with pytest.raises(RunFailed, match=r"engine-1 cannot be started: node 127\.0\.0\.2 is gone"):
        fleet.start()
    assert pids_of(fleet) == []


def test_engine_of_a_lost_node_moves_to_a_spare_or_is_retired(tmp_path: Path) -> None:
    here, first, second, third = Slot(LocalNode()), *(Slot(FarNode(f"127.0.0.{number}")) for number in (2, 3, 4))
    spares, asked = [third, second], []

    def spare(like: Slot) -> Slot | None:
        asked.append(like)
        return spares.pop() if spares else None

    def lose(slot: Slot) -> None:
        assert isinstance(slot.node, FarNode)
        slot.node.lose()

    with make_fleet(tmp_path, "fine", rollout_num_gpus=2, slots=[here, first], spare=spare) as fleet:
        lose(first)
        assert fleet.why_ended(0) is None
        assert fleet.why_ended(1) == "engine-1 has ended: its node (node 127.0.0.2) is gone"
        lose(second)  # the loss is not yet detected when this spare is assigned
        fleet.restart(1)
        assert asked == [first, second]
        assert fleet.urls[1].startswith("http://127.0.0.4:")
        fleet.check()
        assert len(pids_of(fleet)) == 6
        lose(third)
        with pytest.raises(
            EngineRetired, match=r"node \(node 127\.0\.0\.4\) of engine-1 is gone, and there is no other"
        ):
            fleet.restart(1)
        assert (len(fleet.urls), asked[2:]) == (1, [third])
        assert fleet.why_ended(1) == "it was removed from the fleet"
        fleet.check()
        assert len(pids_of(fleet)) == 3


def test_supervisor_moves_an_engine_to_a_spare_node_then_removes_it(tmp_path: Path) -> None:
    near, far, spares = LocalNode(), FarNode("127.0.0.2"), [Slot(FarNode("127.0.0.3"))]
    brought: list[str] = []

    def refresh(url: str) -> bool:
        brought.append(url)
        return True

    loop = LoopThread("test")
    slots, watch = (
        [Slot(near), Slot(far)],
        HealthCheckSettings(interval_s=60.0, timeout_s=120.0, first_wait_s=60.0, max_restarts=3),
    )
    last = spares[0].node
    assert isinstance(last, FarNode)
    with make_fleet(
        tmp_path, "fine", rollout_num_gpus=2, slots=slots, spare=lambda like: spares.pop() if spares else None, key="k"
    ) as fleet:

        async def make() -> EnginePool:
            return EnginePool(fleet.urls, api_key=fleet.key)

        pool = loop.run(make())
        supervisor = Supervisor(fleet, pool, loop.run, watch, refresh=refresh, key=fleet.key)
        try:
            far.lose()
            supervisor.heal()
            assert [url.rpartition(":")[0] for url in pool.urls] == ["http://127.0.0.1", "http://127.0.0.3"]
            assert [client.base_url for client in pool.up] == fleet.urls
            assert (brought, [client.api_key for client in pool.clients]) == (fleet.urls[1:], ["k", "k"])
            last.lose()
            supervisor.heal()
            assert pool.urls == fleet.urls == [client.base_url for client in pool.up]
            assert len(pool) == 1
        finally:
            supervisor.close()
            loop.run(pool.aclose())
            loop.close()


def test_engines_on_other_nodes_enable_fault_tolerance() -> None:
    here, far = Slot(LocalNode()), Slot(FarNode("127.0.0.2"))
    config = Config(hf_checkpoint="unused", rollout_num_gpus=2)
    assert with_fault_tolerance_across_nodes(config, SlotPlacement((far,), (here, here))) is config
    assert with_fault_tolerance_across_nodes(config, SlotPlacement((here,), (here, far))).use_fault_tolerance
    pairs = config.replace(prefill_num_servers=1)
    assert with_fault_tolerance_across_nodes(pairs, SlotPlacement((here,), (here, far))) is pairs


def test_each_port_of_a_node_is_given_out_once() -> None:
    class Narrow(LocalNode):
        asked: ClassVar[list[int]] = []

        def free_ports(self, count: int) -> list[int]:
            self.asked.append(count)
            return [1, 2] if len(self.asked) < 3 else [3, 4][:count]

    ports, node = PortAllocator(), Narrow()
    assert (ports.take(node, 2), ports.take(node, 2), node.asked) == ([1, 2], [3, 4], [2, 2, 2])
    assert ports.take(Narrow(), 2) == [3, 4]  # ports of another node


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::", "http://[::1]:7"),
        ("fd00::2", "http://[fd00::2]:7"),
        ("h", "http://h:7"),
    ],
)
def test_url_of_an_engine_with_wildcard_or_ipv6_host(host: str, url: str) -> None:
    assert Launch("engine-0", host, 7).url == url
