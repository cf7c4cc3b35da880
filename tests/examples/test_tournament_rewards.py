"""Tournament rewards of a group: judges that are functions or models, both orders, and judge failures."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.mcp_arena.tournament import TOPOLOGIES, JudgeFailed, Match, ServedJudge, Tournament, verdict_of
from examples.mcp_arena.tournament.rewards import Calls
from slime.config import Config, derive
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.metrics import rollout_metrics
from slime.rollout.rewards.worker_pool import RewardError

ARGS = Namespace()


def group(*answers: str, rollouts: list[int] | None = None) -> list[Sample]:
    return [
        Sample(
            index=i,
            group_index=3,
            rollout_id=i if rollouts is None else rollouts[i],
            response=answer,
            prompt="q",
            status=Sample.Status.COMPLETED,
        )
        for i, answer in enumerate(answers)
    ]


def longer(args: Any, first: Sample, second: Sample) -> float:
    a, b = len(first.response), len(second.response)
    return 0.5 if a == b else float(a > b)


def rewards(tournament: Tournament, samples: list[Sample]) -> list[float]:
    return asyncio.run(tournament.rewards(ARGS, samples))


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_best_response_has_the_highest_reward(name: str) -> None:
    samples = group("aa", "aaaaa", "a", "aaaa", "aaa")
    given = rewards(Tournament(longer, name), samples)
    assert given[1] == 1.0
    assert max(given) == 1.0
    assert sum(given) == pytest.approx(2.5)


def test_match_counts_are_recorded_and_logged() -> None:
    samples = group("a", "aa", "aaa", "aa")
    assert rewards(Tournament(longer, "round_robin"), samples) == [0.0, 0.5, 1.0, 0.5]
    noted = {"matches": 6, "judge_calls": 12, "judge_failures": 0, "ties": 1, "undecided": 0}
    assert samples[0].metadata["tournament"] == noted
    more = group("a", "aa")
    rewards(Tournament(longer, "round_robin", swap=False), more)
    config = derive(Config(rollout_batch_size=1))
    assert rollout_metrics(config, [*samples, *more], 1.0)["rollout/tournament_judge_calls"] == 13.0
    assert not [name for name in rollout_metrics(config, group("a"), 1.0) if "tournament" in name]


def test_rollout_samples_play_as_one_and_failed_samples_do_not_play() -> None:
    samples = group("a", "aaaa", "aa", "aaa", "aaaaaa", rollouts=[0, 0, 1, 2, 3])
    samples[4].status = Sample.Status.FAILED
    given = rewards(Tournament(longer, "round_robin"), samples)
    assert given[:4] == [1.0, 1.0, 0.0, 0.5]
    assert samples[0].metadata["tournament"]["matches"] == 3


def test_single_sample_gets_half_and_empty_group_gets_no_rewards() -> None:
    assert rewards(Tournament(longer), group("a")) == [0.5]
    assert rewards(Tournament(longer), []) == []


def test_position_bias_of_the_judge_cancels_over_both_orders() -> None:
    samples = group("a", "aa", "aaa")
    assert rewards(Tournament(lambda args, first, second: 1.0, "round_robin"), samples) == [0.5, 0.5, 0.5]
    assert samples[0].metadata["tournament"]["ties"] == 3


def test_failed_judge_call_is_retried() -> None:
    asked: list[tuple[Any, Any]] = []

    async def stumbles(args: Any, first: Sample, second: Sample) -> float:
        pair = (first.index, second.index)
        asked.append(pair)
        if asked.count(pair) == 1:
            raise JudgeFailed("busy")
        return longer(args, first, second)

    samples = group("a", "aa", "aaa")
    assert rewards(Tournament(stumbles, "round_robin", first_pause_s=0.0), samples) == [0.0, 0.5, 1.0]
    account = samples[0].metadata["tournament"]
    assert (account["judge_calls"], account["judge_failures"], account["undecided"]) == (12, 6, 0)


def test_sync_judge_does_not_block_the_event_loop() -> None:
    both = threading.Barrier(2, timeout=60.0)
    seen: list[bool] = []

    def meets(args: Any, first: Sample, second: Sample) -> float:
        both.wait()  # wait for the call with the other order
        seen.append(threading.current_thread() is threading.main_thread())
        return longer(args, first, second)

    assert asyncio.run(Match(meets, tries=1).score(ARGS, *group("a", "aa"), Calls())) == 0.0
    assert seen == [False, False]


@pytest.mark.parametrize("failure", [StopIteration(), SystemExit(3)])
def test_exception_in_a_sync_judge_leaves_the_match_undecided(failure: BaseException) -> None:
    def raises(args: Any, first: Sample, second: Sample) -> float:
        raise failure

    calls = Calls()
    assert asyncio.run(Match(raises, tries=1).score(ARGS, *group("a", "b"), calls)) is None
    assert (calls.made, calls.failed) == (2, 2)


@pytest.mark.parametrize("answer", [None, "A", 2.0, float("nan"), [1]])
def test_invalid_verdict_leaves_the_match_undecided(answer: Any) -> None:
    calls = Calls()
    match = Match(lambda args, first, second: answer, tries=2, first_pause_s=0.0)
    assert asyncio.run(match.score(ARGS, *group("a", "b"), calls)) is None
    assert (calls.made, calls.failed) == (4, 4)


def test_unjudgeable_sample_fails_and_the_others_are_ranked() -> None:
    def refuses(args: Any, first: Sample, second: Sample) -> float:
        if "?" in first.response + second.response:
            raise RuntimeError("cannot be read")
        return longer(args, first, second)

    samples = group("a", "?", "aaa", "aa")
    given = rewards(Tournament(refuses, "round_robin", first_pause_s=0.0), samples)
    assert [given[0], given[2], given[3]] == [0.0, 1.0, 0.5]
    assert samples[1].status is Sample.Status.FAILED
    assert samples[1].failure == "reward: the judge decided none of its matches"
    assert samples[0].metadata["tournament"]["undecided"] == 3


def test_judge_that_always_fails_fails_the_group() -> None:
    def down(args: Any, first: Sample, second: Sample) -> float:
        raise OSError("no route")

    with pytest.raises(RewardError, match=r"decided none of 3 matches \(18 of 18 calls failed\)"):
        rewards(Tournament(down, "round_robin", first_pause_s=0.0), group("a", "b", "c"))


def test_rejects_invalid_settings() -> None:
    with pytest.raises(UserError, match=r"unknown tournament 'swis' \(did you mean swiss\?\)"):
        Tournament(longer, "swis")
    with pytest.raises(UserError, match="tries is 0"):
        Tournament(longer, tries=0)
    with pytest.raises(UserError, match=r"must have the fields \{first\} and \{second\}"):
        ServedJudge(prompt="which? {question}")
    with pytest.raises(UserError, match="cannot be filled in"):
        ServedJudge(prompt="{first} {second} {third}")


@pytest.mark.parametrize(
    ("text", "share"),
    [("A", 1.0), (" b. ", 0.0), ("tie", 0.5), ("[[A]] at first, but no: [[B]]", 0.0), ("so [[ C ]]", 0.5)],
)
def test_verdicts_are_parsed(text: str, share: float) -> None:
    assert verdict_of(text) == share


@pytest.mark.parametrize("text", ["", "A or B", "neither", "[[D]]", "Answer"])
def test_text_without_a_verdict_is_a_judge_failure(text: str) -> None:
    with pytest.raises(JudgeFailed):
        verdict_of(text)


# model judge


async def with_server(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], ask: Callable[[str], Awaitable[Any]]
) -> Any:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server:
        return await ask(str(server.make_url("")))


def said(text: Any, reason: str = "stop") -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": reason}]})


def test_served_judge_sees_both_orders_and_its_verdicts_set_rewards() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        first, second = body["messages"][-1]["content"].split("|")[1:]
        return said("[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]")

    def ask(url: str) -> Awaitable[Any]:
        judge = ServedJudge(url + "/v1", prompt="{question}|{first}|{second}", system="be fair", max_tokens=7)
        return Tournament(judge, "round_robin").rewards(ARGS, group("aa", "a", "aaa"))

    assert asyncio.run(with_server(handler, ask)) == [0.5, 0.0, 1.0]
    assert sorted(body["messages"][1]["content"] for body in seen) == sorted(
        ["q|aa|a", "q|a|aa", "q|aa|aaa", "q|aaa|aa", "q|a|aaa", "q|aaa|a"]
    )
    assert all(body["messages"][0] == {"role": "system", "content": "be fair"} for body in seen)
    assert all((body["max_tokens"], body["temperature"]) == (7, 0.0) for body in seen)


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ([lambda: web.Response(status=503, text="later"), lambda: said("A")], 1.0),
        ([lambda: said("A", "abort"), lambda: said("well"), lambda: said("A")], 1.0),
        ([lambda: web.json_response({"choices": []}), lambda: said(None), lambda: web.Response(text="<html>")], None),
        ([lambda: web.Response(status=400, text="no such model")], None),
    ],
)
def test_served_judge_retries_failures_but_not_a_400(
    answers: list[Callable[[], web.Response]], score: float | None
) -> None:
    left = list(answers)

    async def handler(request: web.Request) -> web.Response:
        return left.pop(0)()

    calls = Calls()

    def ask(url: str) -> Awaitable[Any]:
        return Match(ServedJudge(url), swap=False, first_pause_s=0.0).score(ARGS, *group("a", "b"), calls)

    assert asyncio.run(with_server(handler, ask)) == score
    assert (calls.made, left) == (len(answers), [])


def test_judge_without_a_url_uses_the_routers_of_the_run() -> None:
    args = Namespace(
        sglang_router_ip="10.0.0.1", sglang_router_port=80, sglang_model_routers={"judge": ("10.0.0.2", 81)}
    )
    assert ServedJudge()._address(args) == "http://10.0.0.1:80"
    assert ServedJudge(model="judge")._address(args) == "http://10.0.0.2:81"
    with pytest.raises(UserError, match=r"no model 'jury' is served for the judge \(there is: judge\)"):
        asyncio.run(Match(ServedJudge(model="jury")).score(args, *group("a", "b"), Calls()))
