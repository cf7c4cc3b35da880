from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from slime.config import Config
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.rewards.remote import RemoteReward
from slime.rollout.rewards.worker_pool import RewardError
from slime.rollout.rm_hub import async_rm, batched_async_rm

PLUGIN = """
import numpy as np

def plain(args, sample):
    return len(sample.response)

async def waiting(args, sample, **kwargs):
    return {"score": 1.0, "type": args.rm_type}

async def together(args, samples, **kwargs):
    return [100 * len(samples) + len(sample.response) for sample in samples]

def group_by_flag(args, batch):
    return np.arange(len(batch), dtype=np.float32)

def too_few(args, samples):
    return [1.0]

def nothing(args, sample):
    return None

def text(args, sample):
    return "1.0"

def a_list(args, sample):
    return [1.0]

def text_entry(args, sample):
    return {"score": "1.0"}

def several(args, sample):
    return np.array([1.0, 2.0])

def truth(args, sample):
    return True

def infinite_entry(args, sample):
    return {"score": float("inf"), "other": "text"}

def not_a_number(args, sample):
    return float("nan")

def broken(args, sample):
    raise ZeroDivisionError("oops")

def wrong_signature():
    return 1
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "reward_plugin.py"
    path.write_text(PLUGIN)
    return lambda name: f"{path}:{name}"


@pytest.fixture
def make_hub() -> Iterator[Callable[..., RewardHub]]:
    hubs: list[RewardHub] = []

    def make(**flags: Any) -> RewardHub:
        hubs.append(RewardHub(Config(rollout_batch_size=1, **flags)))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def score(hub: RewardHub, sample: Sample) -> Any:
    return asyncio.run(hub.score(sample))


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("math", r"\boxed{4}", "4", 1.0),
        ("dapo", "Answer: 4", "4", {"score": 1.0, "acc": True, "pred": "4"}),
        ("deepscaler", r"</think>\boxed{4}", "4", 1.0),
        ("f1", "a red dog", "red dog", 1.0),
        ("gpqa", "Answer: B", "B", 1.0),
        ("boxed_f1", r"many words \boxed{red dog}", "red dog", 1.0),
        ("boxed_f1", "red dog", "red dog", 0.0),
        ("boxed_math", r"1 and \boxed{4}", "4", 1.0),
        ("boxed_math", "4", "4", 0.0),
        ("boxed_gpqa", r"\boxed{B}", "B", 1.0),
    ],
)
def test_builtin_reward_types(
    make_hub: Callable[..., RewardHub], rm_type: str, response: str, label: str, reward: Any
) -> None:
    assert score(make_hub(rm_type=rm_type), Sample(response=response, label=label)) == reward


def test_metadata_rm_type_overrides_the_flag(make_hub: Callable[..., RewardHub]) -> None:
    sample = Sample(response="a red dog", label="red dog", metadata={"rm_type": "f1"})
    assert score(make_hub(rm_type="math"), sample) == 1.0


def test_rejects_invalid_settings_and_labels(make_hub: Callable[..., RewardHub], plugin: Callable[[str], str]) -> None:
    for flags, sample, message in (
        (
            {"rm_type": "maths"},
            Sample(label="1"),
            r"unknown reward type 'maths' \(did you mean math\?\); known: math, dapo",
        ),
        ({}, Sample(label="1"), "--rm-type or a function with --custom-rm-path"),
        ({"rm_type": "math"}, Sample(response="1"), "set --label-key"),
        ({"rm_type": "f1"}, Sample(response="1", label={"a": 1}), "a label must be a text, a number or chat messages"),
        ({"rm_type": "dapo"}, Sample(response="Answer: 1", label=[["1"]]), "a label must be a text"),
        ({"rm_type": "gpqa"}, Sample(response="A", label=["A"]), "a label must be a text"),
        ({"rm_type": "remote_rm"}, Sample(), "--rm-url"),
        ({"custom_rm_path": plugin("wrong_signature")}, Sample(), "--custom-rm-path"),
        ({"custom_rm_path": plugin("absent")}, Sample(), "--custom-rm-path"),
    ):
        with pytest.raises(UserError, match=message):
            score(make_hub(**flags), sample)


def test_custom_reward_functions_are_called(make_hub: Callable[..., RewardHub], plugin: Callable[[str], str]) -> None:
    sample = Sample(response="four")
    assert score(make_hub(custom_rm_path=plugin("plain")), sample) == 4.0
    assert score(make_hub(custom_rm_path=plugin("waiting"), rm_type="f1"), sample) == {"score": 1.0, "type": "f1"}
    assert score(make_hub(custom_rm_path=plugin("together")), sample) == 104.0
    own = Sample(response="four", custom_rm_path=plugin("plain"))
    assert score(make_hub(custom_rm_path=plugin("waiting")), own) == 4.0


def test_rejects_invalid_results_of_a_custom_function(
    make_hub: Callable[..., RewardHub], plugin: Callable[[str], str]
) -> None:
    wanted = "the reward of sample 3 must be a number or a dict, got"
    remedy = "return one, or raise an exception to fail this sample alone"
    for name, message in (
        ("nothing", rf":nothing: {wanted} None \(is a return missing\?\): {remedy}$"),
        ("text", rf":text: {wanted} '1.0' \(str\): {remedy}$"),
        ("a_list", rf":a_list: {wanted} \[1.0\] \(list\): {remedy}$"),
        ("several", rf":several: {wanted} array\(\[1., 2.\]\) \(ndarray\): {remedy}$"),
        ("not_a_number", r":not_a_number: the reward of sample 3 is nan, which is not a finite number"),
        ("infinite_entry", r":infinite_entry: the reward's score of sample 3 is inf"),
        ("text_entry", r":text_entry: the reward's score of sample 3 must be a number or a dict, got '1.0' \(str\)"),
    ):
        with pytest.raises(UserError, match=message):
            score(make_hub(custom_rm_path=plugin(name), reward_key="score"), Sample(index=3))
    assert score(make_hub(custom_rm_path=plugin("truth")), Sample()) == 1.0
    with pytest.raises(ZeroDivisionError, match="oops"):
        score(make_hub(custom_rm_path=plugin("broken")), Sample())
    few = r"too_few got 2 samples and must return a list of as many rewards, but it returned \[1.0\] \(list\): correct it$"
    with pytest.raises(UserError, match=few):
        asyncio.run(make_hub(custom_rm_path=plugin("too_few")).score_group([Sample(), Sample()]))


def test_groups_are_scored_by_sample_or_as_a_batch(
    make_hub: Callable[..., RewardHub], plugin: Callable[[str], str]
) -> None:
    samples = [Sample(response="x" * number) for number in range(3)]

    def rewards(hub: RewardHub) -> list[Any]:
        return asyncio.run(hub.score_group(samples))

    assert rewards(make_hub(custom_rm_path=plugin("plain"))) == [0.0, 1.0, 2.0]
    assert rewards(make_hub(custom_rm_path=plugin("together"))) == [300.0, 301.0, 302.0]
    by_flag = rewards(make_hub(custom_rm_path=plugin("group_by_flag"), group_rm=True))
    assert by_flag == [0.0, 1.0, 2.0]
    assert all(type(reward) is float for reward in by_flag)
    samples[1].custom_rm_path = plugin("plain")
    assert rewards(make_hub(custom_rm_path=plugin("together"))) == [200.0, 1.0, 202.0]
    samples[1].custom_rm_path = plugin("broken")
    with pytest.raises(ZeroDivisionError):
        rewards(make_hub(custom_rm_path=plugin("together")))


def test_plugin_entry_points_use_the_settings_of_their_args(plugin: Callable[[str], str]) -> None:
    args = Config(rollout_batch_size=1, rm_type="f1")
    sample = Sample(response="red dog", label="dog")
    assert asyncio.run(async_rm(args, sample)) == pytest.approx(2 / 3)
    assert asyncio.run(batched_async_rm(args, [sample, sample])) == pytest.approx([2 / 3, 2 / 3])
    other = Config(rollout_batch_size=1, custom_rm_path=plugin("plain"))
    assert asyncio.run(async_rm(other, sample)) == 7.0


def test_numpy_rewards_become_floats(make_hub: Callable[..., RewardHub], tmp_path: Path) -> None:
    path = tmp_path / "numpy_rm.py"
    path.write_text("import numpy\ndef numpy_rm(args, sample):\n    return numpy.float32(0.5)\n")
    reward = score(make_hub(custom_rm_path=str(path)), Sample())
    assert reward == 0.5
    assert not isinstance(reward, np.generic)


async def with_server(
    handler: Callable[[web.Request], Awaitable[web.Response]], ask: Callable[[str], Awaitable[Any]]
) -> Any:
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return await ask(f"http://{host}:{port}/score")
    finally:
        await runner.cleanup()


def test_remote_reward_is_the_value_the_server_returns(make_hub: Callable[..., RewardHub]) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(0.75)

    sample = Sample(prompt="p", response="r", label={"x": 1})
    reward = asyncio.run(with_server(handler, lambda url: make_hub(rm_type="remote_rm", rm_url=url).score(sample)))
    assert reward == 0.75
    assert seen == [{"prompt": "p", "response": "r", "label": {"x": 1}}]


def test_remote_reward_is_retried_after_server_errors() -> None:
    statuses = [503, 429, 500]

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(), text="later") if statuses else web.json_response({"score": 1})

    def ask(url: str) -> Awaitable[Any]:
        return RemoteReward(url, first_pause_s=0.01).score(Sample(), "r")

    assert asyncio.run(with_server(handler, ask)) == {"score": 1}


@pytest.mark.parametrize(
    ("status", "body", "message", "calls"),
    [
        (400, "bad label", "refused with 400: bad label", 1),
        (500, "broken", r"gave up after 3 tries \(.*500.*broken", 3),
        (200, "<html>", "'<html>', which is not JSON", 1),
    ],
)
def test_remote_reward_raises_on_permanent_failure(status: int, body: str, message: str, calls: int) -> None:
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=status, text=body)

    def ask(url: str) -> Awaitable[Any]:
        return RemoteReward(url, tries=3, first_pause_s=0.01).score(Sample(), "r")

    with pytest.raises(RewardError, match=message):
        asyncio.run(with_server(handler, ask))
    assert count == calls


def test_non_numeric_remote_reward_fails_its_sample(make_hub: Callable[..., RewardHub]) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response("good")

    def ask(url: str) -> Awaitable[Any]:
        return make_hub(rm_type="remote_rm", rm_url=url).score(Sample(index=2))

    with pytest.raises(
        RewardError, match=r"^--rm-type remote_rm: the reward of sample 2 must be .* got 'good' \(str\)"
    ):
        asyncio.run(with_server(handler, ask))


def test_error_names_a_reward_function_given_as_an_object() -> None:
    def my_reward(args: Any, sample: Sample) -> Any:
        return "yes"

    hub = RewardHub(Config(rollout_batch_size=1), my_reward)
    try:
        with pytest.raises(UserError, match=r"^the given reward function .*my_reward: the reward of sample 0 must be"):
            score(hub, Sample(index=0))
    finally:
        hub.close()


def test_remote_reward_fails_on_timeout_or_without_a_server() -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response(1)

    def ask(url: str) -> Awaitable[Any]:
        return RemoteReward(url, tries=2, timeout_s=0.05, first_pause_s=0.01).score(Sample(), "r")

    with pytest.raises(RewardError, match=r"gave up after 2 tries \(no answer within 0.05 s\)"):
        asyncio.run(with_server(hang, ask))
    nobody = RemoteReward("http://127.0.0.1:9/score", tries=2, first_pause_s=0.01)
    with pytest.raises(RewardError, match="gave up after 2 tries"):
        asyncio.run(nobody.score(Sample(), "r"))


def test_retry_pauses_grow_within_bounds() -> None:
    remote = RemoteReward("http://x", first_pause_s=1.0, longest_pause_s=30.0)
    for attempt, longest in ((1, 1.0), (2, 2.0), (5, 16.0), (9, 30.0)):
        assert all(longest / 2 <= remote._pause(attempt) <= longest for _ in range(50))
