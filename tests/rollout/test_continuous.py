"""Continuous generation: dispatch budget, staleness bound, and the final place of every group."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import leaves
from slime.rollout.dispatcher import Dispatcher
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.metrics import staleness_metrics
from slime.rollout.outcomes import RolloutFailed
from slime.rollout.pipeline import RolloutMaker, make_feed
from tests.e2e.runs import wait_until

STATUS = Sample.Status
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Timed:
    """Controls the version of an engine and releases its answers on request."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.slow: dict[str, asyncio.Event] = {}
        engine.version = "0"
        engine.respond = self._respond

    def _respond(self, body: Any) -> Any:
        letter = self.tokenizer.decode(body["input_ids"][:1])
        return self._late(letter) if letter in self.slow else "7</s>"

    async def _late(self, letter: str) -> str:
        await self.slow[letter].wait()
        return "77</s>"

    def hold(self, letter: str) -> None:
        self.slow[letter] = asyncio.Event()

    def release(self, letter: str) -> None:
        self.engine._loop.loop.call_soon_threadsafe(self.slow[letter].set)


@pytest.fixture
def timed(engine: Any, tokenizer: Any) -> Timed:
    return Timed(engine, tokenizer)


class Generation:
    """A continuous rollout and its data source, driven from outside the event loop as a run does."""

    def __init__(self, runtime: Any, source: Any, *, total: int = 8, first: int = 0, version: int = 0) -> None:
        self.runtime, self.source = runtime, source
        self.continuous = Dispatcher(runtime, source, first)
        runtime.run(self.continuous.start(total=total, version=version))

    def take(self, rollout_id: int) -> tuple[list[str], dict[str, Any]]:
        output = self.runtime.run(self.continuous.take(rollout_id), 120)
        self.output = output
        stale = staleness_metrics(list(leaves(output.samples)), rollout_id)
        return [next(leaves(group)).prompt for group in output.samples], output.metrics | stale

    def update(self, version: int, engine: Any) -> None:
        engine.version = str(version)
        self.runtime.run(self.continuous.weights_arrived(version))

    def wait_for_ready(self, groups: int) -> None:
        """Wait until this many groups are ready and waiters have seen them."""

        async def ready() -> None:
            while len(self.continuous._ready) < groups:  # noqa: ASYNC110  the rollout has no event for it
                await asyncio.sleep(0.01)

        self.runtime.run(ready(), 120)
        self.settle()

    def settle(self) -> None:
        """Let the dispatcher process all changes and the results of its threads."""
        threads = self.runtime.threads

        async def turn() -> bool:
            for _ in range(10):
                await asyncio.sleep(0)
            return not (threads._queue or threads._running)

        assert wait_until(lambda: self.runtime.run(turn()) and self.runtime.run(turn()), 120)

    def close(self) -> None:
        self.runtime.run(self.continuous.aclose())


@pytest.fixture
def begin(engine: Any, make_runtime: Any, prompts: Any):
    begun: list[Generation] = []

    def start(count: int = 26, staleness: int = 1, source: Any = None, total: int = 8, **flags: Any) -> Generation:
        runtime = make_runtime(
            [engine.url],
            async_mode="full",
            max_weight_staleness=staleness,
            n_samples_per_prompt=1,
            **{"rm_type": "random"} | flags,
        )
        begun.append(Generation(runtime, source or prompts(list(LETTERS[:count]), n=1), total=total))
        return begun[-1]

    yield start
    for generation in begun:
        generation.close()


def test_dispatch_budget_follows_the_staleness_bound(begin: Any, timed: Timed, engine: Any) -> None:
    generation = begin(staleness=1)
    generation.wait_for_ready(4)  # otherwise the groups that finish first are taken
    taken, metrics = generation.take(0)
    assert taken == ["a", "b"]
    assert generation.source.asked == [4]  # rollouts 0 and 1 may be sampled with version 0
    assert metrics["rollout/staleness/max"] == 0.0
    assert generation.take(1)[0] == ["c", "d"]
    assert generation.source.asked == [4]
    generation.update(2, engine)
    generation.wait_for_ready(4)
    assert generation.take(2)[0] == ["e", "f"]
    assert generation.source.asked == [4, 4]  # version 2 serves rollouts 2 and 3


def test_slow_group_is_overtaken_until_it_would_exceed_the_bound(begin: Any, timed: Timed, engine: Any) -> None:
    timed.hold("a")
    timed.hold("d")  # otherwise d could finish before b and c
    generation = begin(staleness=1)
    assert generation.take(0)[0] == ["b", "c"]
    timed.release("d")
    generation.wait_for_ready(1)
    generation.update(1, engine)
    taking = asyncio.run_coroutine_threadsafe(generation.continuous.take(1), generation.runtime.loop_thread.loop)
    generation.wait_for_ready(3)
    assert not taking.done()  # d, e and f are ready, but a would be too stale for rollout 2
    timed.release("a")
    groups = taking.result(120).samples
    assert [next(leaves(group)).prompt for group in groups] == ["a", "d"]
    assert staleness_metrics(list(leaves(groups)), 1)["rollout/staleness/max"] == 1.0
    assert taking.result().metrics["rollout/thrown_away_tokens"] == 0.0
    assert taking.result().metrics["perf/rollout_tail_time"] > 0.0  # d was ready long before a


def test_random_delays_keep_the_staleness_bound_and_lose_no_group(
    begin: Any, engine: Any, tokenizer: Any, make_runtime: Any, prompts: Any
) -> None:
    chance = random.Random(7)

    async def late(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "7</s>"

    engine.version = "0"
    engine.respond = lambda body: late(chance.choice([0.0, 0.01, 0.02, 0.2]))
    generation = begin(count=26, staleness=2, total=13)
    seen: list[str] = []
    for rollout_id in range(13):
        taken, metrics = generation.take(rollout_id)
        assert metrics["rollout/staleness/max"] <= 2.0
        assert metrics["rollout/thrown_away_tokens"] == 0.0
        seen += taken
        generation.update(rollout_id + 1, engine)
    assert sorted(seen) == list(LETTERS)


@pytest.mark.parametrize("policy", ["regenerate", "drop"])
def test_stale_groups_are_regenerated_or_dropped(
    policy: str, begin: Any, timed: Timed, prompts: Any, tokenizer: Any
) -> None:
    source = prompts(["a", "b", "c"], n=1)
    old = source.groups[0][0]
    old.tokens = tokenizer.encode("a9", add_special_tokens=False)
    old.response, old.response_length, old.loss_mask, old.rollout_log_probs = "9", 1, [1], [-1.0]
    old.weight_versions, old.version_spans, old.status = ["-4"], [["-4", 1]], STATUS.ABORTED
    generation = begin(staleness=1, source=source, stale_samples=policy)
    generation.wait_for_ready(2 if policy == "drop" else 3)
    taken, metrics = generation.take(0)
    assert (metrics["rollout/stale_groups"], metrics["rollout/thrown_away_tokens"]) == (1.0, 1.0)
    if policy == "drop":
        assert taken == ["b", "c"]
        return
    assert taken == ["a", "b"]
    sample = next(leaves(generation.output.samples))
    assert (sample.response, sample.weight_versions, sample.version_spans) == ("7", ["0"], [["0", 2]])


def test_groups_dropped_by_a_filter_are_replaced(begin: Any, timed: Timed, write_plugin: Any) -> None:
    filter_path = write_plugin("def f(args, samples):\n    return samples[0].prompt not in 'bd'\n")
    generation = begin(dynamic_sampling_filter_path=filter_path)
    generation.wait_for_ready(4)
    taken, metrics = generation.take(0)
    assert taken == ["a", "c"]
    assert sum(value for name, value in metrics.items() if name.startswith("rollout/dynamic_filter/drop_")) >= 1.0
    assert generation.take(1)[0] == ["e", "f"]


def test_exhausted_source_gives_a_smaller_last_rollout(begin: Any, timed: Timed) -> None:
    generation = begin(count=3)
    generation.wait_for_ready(3)
    assert generation.take(0)[0] == ["a", "b"]
    assert generation.take(1)[0] == ["c"]


def test_user_error_in_generation_is_raised_by_take(begin: Any, timed: Timed, write_plugin: Any) -> None:
    reward = write_plugin("def f(args, sample):\n    return float('nan') if sample.prompt == 'c' else 1.0\n")
    generation = begin(rm_type=None, custom_rm_path=reward)
    taken = []
    with pytest.raises(UserError, match="the reward of sample 2 is nan, which is not a finite number"):
        taken.extend(generation.take(rollout_id) for rollout_id in range(3))


def test_aclose_leaves_no_task(begin: Any, timed: Timed) -> None:
    timed.hold("a")
    timed.hold("b")
    generation = begin()
    generation.settle()
    generation.close()
    assert not generation.runtime.state.pendings
    loop = generation.runtime.loop_thread.loop
    assert not [task for task in asyncio.all_tasks(loop) if "continuous" in task.get_name()]


def test_reward_function_that_always_raises_cancelled_fails_the_rollout(
    begin: Any, timed: Timed, write_plugin: Any
) -> None:
    reward = write_plugin("import asyncio\n\nasync def f(args, sample):\n    raise asyncio.CancelledError\n")
    generation = begin(rm_type=None, custom_rm_path=reward)
    with pytest.raises(
        RolloutFailed, match=r"samples failed; the first one: reward: Leaked: .* let a CancelledError out"
    ):
        generation.take(0)


def test_state_has_the_id_of_the_rollout_being_taken(begin: Any, timed: Timed, prompts: Any) -> None:
    generation = begin()
    assert generation.runtime.state.rollout_id == 0
    generation.take(0)
    generation.take(1)
    assert generation.runtime.state.rollout_id == 1


@pytest.mark.parametrize(("start", "total", "replayed"), [(10, 5, []), (4, 6, [4, 5, 6])])
def test_run_with_nothing_left_to_generate_dispatches_nothing(
    start: int, total: int, replayed: list[int], engine: Any, make_runtime: Any, prompts: Any
) -> None:
    runtime = make_runtime([engine.url], async_mode="full", rm_type="random", n_samples_per_prompt=1)
    source = prompts(list("abc"), n=1)
    maker = RolloutMaker(runtime, None, source, log=lambda *_: False, at_work=nullcontext)
    feed = make_feed(maker, start=start, total=total, replayed=replayed)
    feed.weights_arrived(start)
    feed.close()
    assert source.asked == []


def test_ready_group_version_is_computed_once(begin: Any, timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of a group is computed when it arrives, not again for each later arrival."""
    letters = LETTERS[:12]
    for letter in letters:
        timed.hold(letter)
    generation = begin(staleness=0, rollout_batch_size=len(letters))
    generation.settle()
    loop = generation.runtime.loop_thread.loop
    looks: list[Sample] = []
    found = Sample.oldest_weight_version.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Sample, "oldest_weight_version", property(lambda sample: (looks.append(sample), found(sample))[1])
    )
    taking = asyncio.run_coroutine_threadsafe(generation.continuous.take(0), loop)
    for count, letter in enumerate(letters[:-1], start=1):
        timed.release(letter)
        generation.wait_for_ready(count)
        assert len(looks) == count
    timed.release(letters[-1])
    assert len(taking.result(120).samples) == len(letters)


def test_fully_async_function_takes_from_ongoing_generation(timed: Timed, make_runtime: Any, prompts: Any) -> None:
    runtime = make_runtime([timed.engine.url], num_rollout=3, rm_type="random")
    source = prompts(LETTERS[:6], 2)
    timed.hold("e")
    taken = []
    for rollout_id in range(2):
        runtime.state.weight_version = str(rollout_id)
        output = generate_rollout_fully_async(runtime.plugin_args, rollout_id, source)
        assert len(output.samples) == 2
        taken += [group[0].prompt for group in output.samples]
    assert wait_until(lambda: source.groups == [], 120)  # all groups are in flight before the last rollout is requested
    timed.release("e")
    last = generate_rollout_fully_async(runtime.plugin_args, 2, source)
    assert sorted([*taken, *(group[0].prompt for group in last.samples)]) == list(LETTERS[:6])
