"""Unit tests of plugins without a run: helpers accept any object that has the needed flags."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import sglang_rollout
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.utils.misc import load_function
from slime.utils.types import Sample

PLUGIN = """
    from slime.utils.types import Sample

    async def generate(args, sample, sampling_params, evaluation=False):
        sample.tokens, sample.response_length = [7, 8], 2
        sample.response = f"{'eval' if evaluation else 'train'} {sampling_params['temperature']} {args.own}"
        sample.status = Sample.Status.COMPLETED
        return sample

    async def fan_out(args, sample, sampling_params):
        return [sample, Sample(index=sample.index, reward=0.25)]

    async def broken(args, sample, sampling_params):
        raise RuntimeError("the tool is gone")

    def hook(args, sample, evaluation):
        sample.metadata["hooked"] = evaluation

    async def score(args, sample):
        return float(len(sample.response))

    async def score_all(args, samples):
        return [float(sample.index) for sample in samples]

    def last_first(args, rollout_id, buffer, num_samples):
        return [buffer.pop() for _ in range(num_samples)]
"""


class Args:
    """A namespace as a unit test writes it, with the needed flags as class attributes."""

    own = "mine"
    n_samples_per_prompt = 2
    custom_generate_function_path = None
    custom_rm_path = None
    group_rm = False
    rm_type = None
    reward_key = None


@pytest.fixture
def plugin(write: Callable[[str, str], str]) -> Callable[[str], str]:
    file = write("mine.py", PLUGIN)
    return lambda name: f"{file}:{name}"


def args_of(**changes: Any) -> Args:
    args = Args()
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def generate_and_score(args: Any, sample: Sample, **more: Any) -> Any:
    return asyncio.run(sglang_rollout.generate_and_rm(args, sample, {"temperature": 0.5}, **more))


@pytest.mark.parametrize("kind", [args_of, Namespace, SimpleNamespace])
def test_generate_function_runs_with_hook_and_reward(kind: Any, plugin: Callable[[str], str]) -> None:
    flags = {"own": 1, "custom_rm_path": plugin("score"), "rollout_sample_hook_path": [plugin("hook")]}
    args = kind(**flags, custom_generate_function_path=plugin("generate"))
    sample = generate_and_score(args, Sample(prompt="q"), evaluation=True)
    assert (sample.response, sample.reward, sample.metadata) == ("eval 0.5 1", 10.0, {"hooked": True})
    own = Sample(prompt="q", generate_function_path=plugin("generate"), reward=3.0)
    assert (generate_and_score(kind(own=1), own).response, own.reward) == ("train 0.5 1", 3.0)
    finished = Sample(prompt="q", response="abc", status=Sample.Status.COMPLETED)
    assert generate_and_score(args, finished).reward == 3.0


def test_fan_out_and_group_are_scored_together(plugin: Callable[[str], str]) -> None:
    fans = plugin("fan_out")
    assert [
        one.reward
        for one in generate_and_score(args_of(group_rm=True, custom_generate_function_path=fans), Sample(index=4))
    ] == [
        None,
        0.25,
    ]
    args = args_of(custom_generate_function_path=fans, custom_rm_path=plugin("score_all"))
    assert [one.reward for one in generate_and_score(args, Sample(index=4))] == [4.0, 0.25]
    args = args_of(custom_generate_function_path=plugin("generate"), custom_rm_path=plugin("score_all"), group_rm=True)
    group = [Sample(index=number) for number in (3, 5)]
    scored = asyncio.run(sglang_rollout.generate_and_rm_group(args, group, {"temperature": 1.0}))
    assert [one.reward for one in scored] == [3.0, 5.0]


def test_generate_error_propagates_and_cancels_siblings(
    plugin: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="the tool is gone"):
        generate_and_score(args_of(custom_generate_function_path=plugin("broken")), Sample(prompt="q"))
    ended = []

    async def one_fails(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Sample:
        if sample.index == 0:
            raise RuntimeError("generation failed")
        try:
            await asyncio.Future()
        finally:
            ended.append(sample.index)
        return sample

    monkeypatch.setattr(sglang_rollout, "generate_and_rm", one_fails)
    with pytest.raises(RuntimeError, match="generation failed"):
        asyncio.run(sglang_rollout.generate_and_rm_group(args_of(), [Sample(index=1), Sample(index=0)], {}))
    assert ended == [1]


def test_monkeypatched_generate_and_load_function_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scripted(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        sample.response, sample.reward = "scripted", 1.0
        return sample

    monkeypatch.setattr(sglang_rollout, "generate", scripted)
    assert generate_and_score(args_of(), Sample(prompt="q")).response == "scripted"
    monkeypatch.setattr(sglang_rollout, "load_function", lambda path: scripted)
    assert (
        generate_and_score(args_of(custom_generate_function_path="no.such.function"), Sample(prompt="q")).reward == 1.0
    )


def test_engine_calls_do_not_bind_other_args_to_the_runtime(engine: Any, model_folder: str) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    address = {"sglang_router_ip": host, "sglang_router_port": int(port)}
    args = args_of(hf_checkpoint=model_folder, rm_type="random", **address)
    params = {"temperature": 1.0, "max_new_tokens": 4}
    try:
        for _ in range(2):
            sample = asyncio.run(sglang_rollout.generate_and_rm(args, Sample(prompt="a"), dict(params)))
            assert (sample.response, sample.status) == ("7", Sample.Status.COMPLETED)
        assert sglang_rollout.find_runtime(args_of()) is None
        assert sglang_rollout.GenerateState(args).tokenizer is not None
    finally:
        sglang_rollout.find_runtime(args).close()
    with pytest.raises(LookupError, match="no rollout is running for these args"):
        sglang_rollout.generate_rollout(args_of(), 0, None)


def test_data_source_buffer_and_filter_work_without_a_run(plugin: Callable[[str], str]) -> None:
    source = RolloutDataSourceWithBuffer(args_of(buffer_filter_path=plugin("last_first")))
    groups = [[Sample(index=0), Sample(index=1)], [Sample(index=2), Sample(index=3)]]
    source.add_samples(groups)
    assert load_function(plugin("last_first"))(args_of(), None, list(source.buffer), 1) == groups[1:]
    assert source.get_samples(1) == groups[1:]
    assert [len(group) for group in RolloutDataSource(args_of()).get_samples(3)] == [2, 2, 2]
    low, high = ([Sample(reward=reward), Sample(reward=reward)] for reward in (0.0, 1.0))
    assert call_dynamic_filter(check_reward_nonzero_std, args_of(), [low, high]).keep
    dropped = call_dynamic_filter(check_reward_nonzero_std, args_of(), [low, low])
    assert (dropped.keep, dropped.reason) == (False, "zero_std_0.0")


def test_reward_functions_work_without_a_run(plugin: Callable[[str], str]) -> None:
    dog = Sample(index=3, response="dog")
    assert asyncio.run(async_rm(args_of(custom_rm_path=plugin("score")), dog)) == 3.0
    args = args_of(group_rm=True, custom_rm_path=plugin("score_all"))
    assert asyncio.run(batched_async_rm(args, [dog, dog])) == [3.0, 3.0]
    assert isinstance(asyncio.run(async_rm(args_of(rm_type="random"), dog)), int | float)
