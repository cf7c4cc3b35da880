"""Sample traces that the default rollout records when dumps are enabled."""

import pytest

from slime.data.sample import Sample
from slime.rollout.base_types import leaves
from slime.rollout.sglang_rollout import generate_and_rm, generate_rollout

GROUP_REWARD = "async def f(args, samples):\n    return [1.0] * len(samples)\n"
ONE, GROUP = "reward_model", "group_reward_model"


def spans(sample):
    return [(event["type"].removeprefix("span_"), event["name"]) for event in sample.trace["events"]]


@pytest.mark.parametrize("group_rm", [False, True])
def test_trace_has_one_span_per_stage(engine, make_runtime, prompts, write_plugin, tmp_path, group_rm):
    flags = {"custom_rm_path": write_plugin(GROUP_REWARD), "group_rm": True} if group_rm else {"rm_type": "random"}
    dumps = str(tmp_path / "{rollout_id}.pt")
    runtime = make_runtime([engine.url], save_debug_rollout_data=dumps, **flags)
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["1+1=", "2+2="], n=2)).samples))
    stages = [("start", "sglang_generate"), ("end", "sglang_generate")]
    own = [] if group_rm else [("start", ONE), ("end", ONE)]
    after = [("start", GROUP), ("end", GROUP)] if group_rm else []
    for sample in samples:
        assert spans(sample) == [
            ("start", "generate_and_rm_group"),
            ("start", "generate_and_rm"),
            *stages,
            *own,
            ("end", "generate_and_rm"),
            ("end", "generate_and_rm_group"),
            *after,
        ]
        begun = {event["name"]: event for event in sample.trace["events"] if event["type"] == "span_start"}
        assert begun["generate_and_rm"]["parent_span_id"] == begun["generate_and_rm_group"]["span_id"]
        assert begun["sglang_generate"]["parent_span_id"] == begun["generate_and_rm"]["span_id"]
        attrs = sample.trace["events"][3]["attrs"]
        assert (attrs["finish_reason"], attrs["completion_tokens"], attrs["weight_version"]) == ("stop", 2, "1")
        assert sample.trace["attempt"] == 0
    assert len({sample.trace["trace_id"] for sample in samples}) == 4


def test_retried_sample_starts_a_new_trace_attempt(engine, make_runtime, tmp_path):
    runtime = make_runtime([engine.url], rm_type="random", save_debug_rollout_data=str(tmp_path / "{rollout_id}.pt"))
    sample = Sample(index=0, prompt="1+1=", status=Sample.Status.FAILED, failure="reward: ValueError: x")
    runtime.run(generate_and_rm(runtime.plugin_args, sample, {"max_new_tokens": 4}))
    assert {event["attempt"] for event in sample.trace["events"]} == {1}


def test_no_trace_is_recorded_without_dumps(engine, make_runtime, prompts):
    runtime = make_runtime([engine.url], rm_type="random")
    for sample in leaves(generate_rollout(runtime.args, 0, prompts(["1+1="], n=2)).samples):
        assert not hasattr(sample, "trace")
