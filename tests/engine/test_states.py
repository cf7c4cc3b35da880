"""The status line of the engines, built from process state, supervisor state and reported load."""

from __future__ import annotations

from typing import Any

import pytest

from slime.engine.fleet.status import EngineLoad, EngineStates, parse_load, request_load
from slime.engine.fleet.supervisor import HealthCheckSettings, Supervisor


def states(loads: dict[str, EngineLoad | None], **others: Any) -> EngineStates:
    ended = others.pop("ended", {})
    urls = list(loads)
    return EngineStates(lambda: urls, why_ended=lambda i: ended.get(urls[i]), load_of=loads.__getitem__, **others)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (EngineLoad(), ("ready", False)),
        (EngineLoad(12, 3), ("generating, 12 running, 3 queued", True)),
        (None, ("busy", True)),
    ],
)
def test_state_of_one_engine(load: EngineLoad | None, said: tuple[str, bool]) -> None:
    one = states({"a": load})
    assert one.sentence() is None
    one.look()
    assert one.sentence() == said


def test_dead_and_restarting_engines_are_named_and_not_queried() -> None:
    away: dict[str, str] = {}
    loads: dict[str, EngineLoad | None] = {"a": EngineLoad(2, 0), "b": EngineLoad(1, 4), "c": EngineLoad()}
    three = states(loads, ended={"b": "killed"}, away=lambda: away)
    three.look()
    assert three.sentence() == ("generating, 2 running, 0 queued; engine-1 dead", True)
    away["b"] = "restarting"
    del loads["b"]
    three.look()
    assert three.sentence() == ("generating, 2 running, 0 queued; engine-1 restarting", True)
    alone = states({"a": EngineLoad()}, ended={"a": "killed"})
    alone.look()
    assert alone.sentence() == ("dead", True)


def test_speed_is_tokens_generated_between_two_polls() -> None:
    now = [0.0]
    loads: dict[str, EngineLoad | None] = {"a": EngineLoad(1, 0, generated=100), "b": EngineLoad(1, 0, generated=0)}
    both = states(loads, now=lambda: now[0])
    both.look()
    assert both.tokens_per_s is None
    now[0] = 2.0
    loads |= {"a": EngineLoad(1, 0, generated=300), "b": EngineLoad(1, 0, generated=20)}
    both.look()
    assert both.tokens_per_s == 110.0
    loads["b"] = None
    both.look()
    assert both.tokens_per_s == 100.0


def test_parses_load_answers_of_both_sglang_dialects() -> None:
    newer = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "gen_throughput": 50.0}, {"num_running_reqs": 2}]}
    assert parse_load(newer) == EngineLoad(5, 1, tokens_per_s=50.0)
    assert parse_load([{"num_reqs": 5, "num_waiting_reqs": 2}]) == EngineLoad(3, 2)
    embedded = {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "generated_tokens": 70}]}
    assert parse_load(embedded) == EngineLoad(1, 0, generated=70)
    assert parse_load("what?") == EngineLoad()


def test_unreachable_engine_has_no_load() -> None:
    assert request_load("http://127.0.0.1:9") is None


class Fleet:
    """A fleet that records the supervisor's `away()` during a restart."""

    urls = ("http://127.0.0.1:9",)

    def __init__(self) -> None:
        self.supervisor: Supervisor | None = None
        self.shown: list[dict[str, str]] = []
        self.ended: str | None = "killed"

    def why_ended(self, index: int) -> str | None:
        return self.ended

    def restart(self, index: int) -> None:
        assert self.supervisor is not None
        self.shown.append(self.supervisor.away())
        self.ended = None


class Pool:
    clients = ()

    def set_down(self, url: str) -> None: ...

    def set_up(self, url: str) -> None: ...


def test_supervisor_reports_restarting_and_waiting_engines() -> None:
    fleet = Fleet()

    def run_async(coro: Any) -> list[Any]:
        coro.close()
        return []

    supervisor = Supervisor(
        fleet,
        Pool(),
        run_async,
        HealthCheckSettings(60.0, 1.0, 60.0, 3),
        refresh=lambda url: False,  # type: ignore[arg-type]
    )
    fleet.supervisor = supervisor
    try:
        supervisor._round(probe=False)
        assert fleet.shown == [{fleet.urls[0]: "restarting"}]
        assert supervisor.away() == {fleet.urls[0]: "waiting for weights"}
        supervisor.weights_arrived()
        assert supervisor.away() == {}
    finally:
        supervisor.close()
