"""Reward deadlines: late calls are named, hanging calls block no others, timely calls are unaffected."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from slime.config import Config
from slime.data.sample import Sample
from slime.rollout.event_loop import DaemonThreads
from slime.rollout.rewards.hub import RewardHub, RewardTimeout
from tests.patience import with_more_time


def samples(count: int) -> list[Sample]:
    return [Sample(index=i, response=str(i), label=str(i)) for i in range(count)]


def hub(function: Any, timeout_s: float, **flags: Any) -> RewardHub:
    return RewardHub(Config(reward_timeout=timeout_s, **flags), function)


async def all_scores(hub: RewardHub, count: int) -> list[Any]:
    return await asyncio.gather(*(hub.score(sample) for sample in samples(count)), return_exceptions=True)


class Judge:
    """An object as a reward function that hangs on even samples."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, args: Any, sample: Sample) -> float:
        if (sample.index or 0) % 2 == 0:
            self.release.wait(240)
        return float(sample.index or 0)


def test_hanging_sync_rewards_time_out_without_blocking_others() -> None:
    def check(seconds: float) -> None:
        judge = Judge()
        judging = hub(judge, seconds)
        judging._threads = DaemonThreads("reward", limit=2)  # fewer threads than hanging calls
        results = asyncio.run(all_scores(judging, 12))
        judge.release.set()
        judging.close()
        assert [result for result in results if not isinstance(result, Exception)] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
        late = [result for result in results if isinstance(result, Exception)]
        assert [type(error) for error in late] == [RewardTimeout] * 6
        assert {str(error) for error in late} == {
            f"the given reward function Judge did not answer within {seconds:g} s (--reward-timeout)"
        }

    with_more_time(check, 0.3, 3.0, 20.0)


def test_async_rewards_that_time_out_are_cancelled_or_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.cluster.watchdog.timeouts.CANCEL_GRACE_S", 0.05)
    ended: list[int] = []

    async def judge(args: Any, sample: Sample) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(sample.index or 0)
            if sample.index == 0:
                await asyncio.sleep(0.2)
            raise
        return 1.0

    judging = hub(judge, 0.1)
    results = asyncio.run(all_scores(judging, 3))
    assert [type(result) for result in results] == [RewardTimeout] * 3
    assert sorted(ended) == [0, 1, 2]
    judging.close()


def test_group_reward_has_one_deadline_for_the_group() -> None:
    def judge(args: Any, samples: list[Sample]) -> list[float]:
        time.sleep(0.0 if len(samples) < 4 else 60.0)
        return [1.0] * len(samples)

    judging = hub(judge, 120.0, group_rm=True)
    assert asyncio.run(judging.score_group(samples(3))) == [1.0, 1.0, 1.0]
    judging.close()
    judging = hub(judge, 0.2, group_rm=True)
    with pytest.raises(
        RewardTimeout, match=r"reward function .*judge did not answer within 0\.2 s \(--reward-timeout\)"
    ):
        asyncio.run(judging.score_group(samples(4)))
    judging.close()


def test_awaitable_returned_by_a_sync_reward_has_the_deadline() -> None:
    async def later(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return 2.0

    def judge(args: Any, sample: Sample) -> Any:
        return later(0.0 if sample.index else 60.0)

    def check(seconds: float) -> None:
        judging = hub(judge, seconds)
        first, second = asyncio.run(all_scores(judging, 2))
        judging.close()
        assert isinstance(first, RewardTimeout)
        assert second == 2.0

    with_more_time(check, 0.2, 2.0, 20.0)


def test_built_in_verifiers_score_under_a_deadline() -> None:
    judging = RewardHub(Config(rm_type="f1", reward_timeout=120.0))
    assert asyncio.run(all_scores(judging, 2)) == [1.0, 1.0]
    judging.close()
