"""examples/mcp_arena: the MCP server, costs of plans, rewards by rank, and a run."""

from __future__ import annotations

import asyncio
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime.agent.tools import McpServer, ToolEnvironment
from slime.data.sample import Sample
from tests.examples.conftest import EXAMPLES, Ran, modules_of

FOLDER = EXAMPLES / "mcp_arena"


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    with modules_of(FOLDER) as read:
        yield read


def plan(question: str, answer: str, index: int = 0) -> Sample:
    return Sample(
        index=index,
        group_index=0,
        rollout_id=index,
        prompt=[{"role": "user", "content": question}],
        metadata={"answer": answer},
        status=Sample.Status.COMPLETED,
    )


def test_server_returns_prices_over_mcp(load: Callable[[str], ModuleType]) -> None:
    prices = load("prices")

    async def ask() -> list[tuple[str, str]]:
        environment = ToolEnvironment([McpServer.stdio([sys.executable, str(FOLDER / "server.py")], name="travel")])
        try:
            async with environment.open(Sample()) as box:
                calls = [
                    ("hotels", {"city": "Rome", "day": 5}),
                    ("trains", {"city": "Rome", "day": 5}),
                    ("trains", {"city": "Atlantis", "day": 5}),
                ]
                results = [await box.call(name, arguments) for name, arguments in calls]
                return [(str(one.outcome), one.text) for one in results]
        finally:
            await environment.aclose()

    rooms, trains, nowhere = asyncio.run(ask())
    assert rooms[1] == prices.offered("hotels", "Rome", 5)
    assert trains[1] == prices.offered("trains", "Rome", 5)
    assert "nothing is known about Atlantis 5" in nowhere[1]
    assert nowhere[0] != trains[0]


def test_plan_is_exactly_one_offered_room_and_train(load: Callable[[str], ModuleType]) -> None:
    prices, task = load("prices"), load("task")
    rooms, trains = prices.prices("hotels", "Oslo", 7), prices.prices("trains", "Oslo", 7)
    assert len(set(rooms)) == len(set(trains)) == 3
    assert task.cost_of("Oslo 7", f"{rooms[1]} {trains[2]}") == rooms[1] + trains[2]
    assert task.least("Oslo 7") == min(rooms) + min(trains)
    taken = next(price for price in prices.OFFERS["hotels"] if price not in rooms)
    room, train = rooms[0], trains[0]
    for answer in ("", f"{room}", f"{train} {room}", f"{room} {train} {train}", f"{taken} {train}", f"{room} x"):
        assert task.cost_of("Oslo 7", answer) is None


def test_held_out_trips_are_in_no_demonstration(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    task = load("task")
    shown = task.demonstrations(300, seed=4)
    training, held_out = task.trips(4)
    assert not set(training) & set(held_out)
    assert not {row["messages"][0]["content"] for row in shown} & {trip.question for trip in held_out}
    rows = task.write_files(tmp_path, shown, seed=4).held_out.read_text().splitlines()
    assert len(rows) == len(held_out)


def test_demonstrated_judge_prefers_the_first_of_two_equal_plans(
    load: Callable[[str], ModuleType],
) -> None:
    task = load("task")
    rng, seen = random.Random(0), {}
    for _ in range(4000):
        _, asked, said = (message["content"] for message in task.comparison(rng))
        seen[asked] = said
    assert (seen["A 80 B 87"], seen["A 87 B 80"], seen["A 85 B 85"]) == ("A", "B", "A")
    assert (seen["A none B 96"], seen["A 96 B none"]) == ("B", "A")


def test_plans_are_rewarded_by_rank(load: Callable[[str], ModuleType]) -> None:
    prices, arena = load("prices"), load("arena")
    by_price, train = sorted(prices.prices("hotels", "Oslo", 7)), prices.prices("trains", "Oslo", 7)[0]
    answers = [f"{by_price[1]} {train}", "no idea", f"{by_price[0]} {train}", f"{by_price[2]} {train}"]
    samples = [plan("Oslo 7", answer, index) for index, answer in enumerate(answers)]
    args: Any = Namespace(arena_topology="round_robin", arena_judge_url=None)
    rewards = asyncio.run(arena.by_rank(args, samples))
    assert rewards == pytest.approx([2 / 3, 0.0, 1.0, 1 / 3])
    assert samples[0].metadata["tournament"]["judge_calls"] == 6  # a function has no position bias: one call per match


def test_held_out_plan_is_right_only_if_cheapest(load: Callable[[str], ModuleType]) -> None:
    task, arena, prices = load("task"), load("arena"), load("prices")
    cheapest = " ".join(str(min(prices.prices(kind, "Oslo", 7))) for kind in prices.OFFERS)
    for answer, right in ((cheapest, 1.0), ("no idea", 0.0)):
        sample = plan("Oslo 7", answer)
        sample.label = str(task.least("Oslo 7"))
        assert arena.is_cheapest(Namespace(), sample) == right


@pytest.mark.examples
@pytest.mark.timeout(1800)
def test_held_out_score_rises_with_rewards_by_rank_only(run_example: Callable[..., Ran]) -> None:
    words = ("--judge", "function", "--seed", "3", "--warm-up-steps", "120", "--steps", "8")
    ran = run_example("mcp_arena/run.py", *words)
    held_out = ran.series("eval/held-out")
    assert held_out[-1] > held_out[0] + 0.08, held_out
    calls = ran.series("rollout/tournament_judge_calls")
    assert calls == [16 * 14] * 8, "seeded single elimination: 14 matches among 8 plans, where all pairs are 28"
    assert not any(ran.series("rollout/tournament_judge_failures"))
    assert sum(ran.series("agent/tool_calls")) > 8 * 16 * 8
