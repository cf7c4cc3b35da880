"""Functions of the default rollout that user-written rollout files call."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from slime.data.buffer import Journal, JournaledSource
from slime.data.sample import Sample
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.evaluate import complete_evaluation
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.outcomes import RolloutFailed
from slime.rollout.pipeline import RolloutMaker
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.sglang_rollout import (
    GenerateState,
    abort,
    eval_rollout_single_dataset,
    generate,
    generate_and_rm,
    generate_and_rm_group,
)
from slime.utils.async_utils import run
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import post

REWARD = "def f(args, sample):\n    return float(sample.response_length)\n"


def hold_requests_of_b(engine, tokenizer):
    """Hold requests for the prompt b until an abort, and answer them with a partial response."""
    b = tokenizer.encode("b", add_special_tokens=False)[0]
    engine.respond = lambda body: engine.held("xy") if body["input_ids"] == [b] else "7</s>"


async def one_finished_then_abort(args, groups, engine):
    state = GenerateState(args)
    state.submit_generate_tasks(groups)
    done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
    while len(engine.requests) < 4:  # noqa: ASYNC110 - until the other requests are at the engine
        await asyncio.sleep(0.01)
    put_back = await abort(args, 3)
    assert state.aborted
    state.reset()
    assert not state.aborted
    return [task.result() for task in done], put_back


@pytest.mark.parametrize("partial", [True, False])
def test_abort_returns_groups_in_flight(engine, make_runtime, write_plugin, prompts, tokenizer, partial):
    hold_requests_of_b(engine, tokenizer)
    runtime = make_runtime([engine.url], partial_rollout=partial, custom_rm_path=write_plugin(REWARD))
    source = prompts(["a", "b"], 2)
    finished, put_back = run(one_finished_then_abort(runtime.plugin_args, source.get_samples(2), engine))
    assert [[sample.index for sample in group] for group in finished] == [[0, 1]]
    assert [[sample.index for sample in group] for group in put_back] == [[2, 3]]
    for sample in put_back[0]:
        kept = (sample.status, sample.response, sample.metadata)
        aborted = (Sample.Status.ABORTED, "xy", {"start_rollout_id": 3})
        assert kept == (aborted if partial else (Sample.Status.PENDING, "", {}))
    engine.respond = lambda body: "z</s>"
    (group,) = run(asyncio_gather(generate_and_rm_group(runtime.plugin_args, put_back[0], {"max_new_tokens": 8})))
    assert [sample.response for sample in group] == (["xyz"] * 2 if partial else ["z"] * 2)


async def asyncio_gather(*work):
    return await asyncio.gather(*work)


def test_request_aborted_by_a_plugin_is_not_resumed(engine, make_runtime):
    runtime = make_runtime([engine.url])
    engine.respond = lambda body: engine.held("xy")
    args = runtime.plugin_args
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    body = {"input_ids": [9], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}

    async def aborted_by(abort_url):
        asked = asyncio.create_task(post(f"{url}/generate", body))
        seen = len(engine.requests)
        while len(engine.requests) == seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.respond = lambda body: "z</s>"
        await post(abort_url, {"abort_all": True})
        return await asked

    answer = run(aborted_by(f"{url}/abort_request"))
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("xy", {"type": "abort"})
    engine.respond = lambda body: engine.held("xy")
    other = engine.url.replace("127.0.0.1", "localhost")  # aborts from elsewhere, as in weight updates
    assert run(aborted_by(f"{other}/abort_request"))["text"] == "xyz</s>"


def test_rollout_functions_can_be_awaited_on_another_event_loop(engine, make_runtime, write_plugin):
    runtime = make_runtime([engine.url], sglang_server_concurrency=1, custom_rm_path=write_plugin(REWARD))
    args = runtime.plugin_args
    params = GenerateState(args).sampling_params

    async def four_groups():
        groups = [[Sample(prompt="a", index=2 * g + i, group_index=g) for i in range(2)] for g in range(4)]
        return await asyncio.gather(*(generate_and_rm_group(args, group, params.copy()) for group in groups))

    async def somewhere_else():
        made = await four_groups()
        one = await generate_and_rm(args, Sample(prompt="a", index=99), params.copy(), evaluation=True)
        return made, one, await generate(args, Sample(prompt="a"), params.copy())

    run(four_groups())  # the first waiter binds the sample semaphore to its loop
    made, one, bare = asyncio.run(somewhere_else())
    assert [sample.reward for group in made for sample in group] == [2.0] * 8
    assert (one.reward, bare.response, bare.reward) == (2.0, "7", None)


def test_samples_generated_on_another_event_loop_are_journaled(engine, make_runtime, write_plugin, prompts, tmp_path):
    runtime = make_runtime([engine.url], custom_rm_path=write_plugin(REWARD))
    runtime.journal = Journal(tmp_path / "journal.sqlite", {}, keep=True)
    (group,) = JournaledSource(prompts(["a"], 2), runtime.journal).get_samples(1)
    asyncio.run(generate_and_rm_group(runtime.plugin_args, group, GenerateState(runtime.plugin_args).sampling_params))
    runtime.journal.close()  # simulates a kill before the rollout is complete
    (again,) = Journal(tmp_path / "journal.sqlite", {}, keep=True).recover(0).groups
    assert [(sample.response, sample.reward) for sample in again] == [("7", 2.0)] * 2


def test_groups_dropped_by_a_filter_are_dropped_in_the_journal(engine, make_runtime, prompts, tmp_path):
    runtime = make_runtime([engine.url])
    runtime.journal = Journal(tmp_path / "journal.sqlite", {}, keep=True)
    source = JournaledSource(prompts(["a", "b", "c", "d"], 2), runtime.journal)
    kept, dropped, needed, spare = source.get_samples(4)
    args = runtime.plugin_args
    fallback = DynamicFilterOutput(False, "same", keep_when_insufficient=True)
    for group, verdict in ((kept, True), (dropped, False)):
        assert call_dynamic_filter(lambda args, samples, v=verdict: v, args, group).keep is verdict
    for group, remaining, is_dropped in ((needed, 2, False), (spare, 3, True)):
        found = call_dynamic_filter(lambda args, samples: DynamicFilterOutput(**vars(fallback)), args, group)
        assert should_drop_dynamic_filter_output(found, remaining, 2) is is_dropped
    runtime.journal.close()
    recovered = Journal(tmp_path / "journal.sqlite", {}, keep=True).recover(0)
    assert [group[0].prompt for group in recovered.groups] == ["a", "c"]


def test_metric_gatherer_counts_drops_by_reason():
    gatherer = MetricGatherer()
    for reason in ("zero_std_1.0", None, "zero_std_1.0", "long"):
        gatherer.on_dynamic_filter_drop(reason=reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_zero_std_1.0": 2, "rollout/dynamic_filter/drop_long": 1}


def test_apply_rollout_sample_hooks_passes_the_rollout_id(engine, make_runtime, write_plugin):
    hook = "def f(args, sample, rollout_id=None):\n    sample.metadata['seen'] = rollout_id\n"
    runtime = make_runtime([engine.url], rollout_sample_hook_path=[write_plugin(hook)])
    runtime.state.reset(7)
    runtime.state.reset()  # as rollout files call it
    done = [Sample(prompt="a", status=Sample.Status.COMPLETED) for _ in range(3)]
    run(apply_rollout_sample_hooks(runtime.plugin_args, done[0], rollout_id=4))
    run(apply_rollout_sample_hooks(runtime.plugin_args, done[1:]))
    assert [sample.metadata["seen"] for sample in done] == [4, 7, 7]


def test_eval_rollout_single_dataset_evaluates_one_dataset(engine, make_runtime, write_plugin, tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text("".join(json.dumps({"input": text}) + "\n" for text in "ab"))
    runtime = make_runtime(
        [engine.url], eval_prompt_data=[["two", str(file)]], eval_interval=1, custom_rm_path=write_plugin(REWARD)
    )
    (dataset,) = runtime.plugin_args.eval_datasets
    for _ in range(2):
        results = run(eval_rollout_single_dataset(runtime.plugin_args, 0, dataset))
    assert results["two"]["rewards"] == [2.0, 2.0]
    assert [sample.prompt for sample in results["two"]["samples"]] == ["a", "b"]
    assert runtime.eval_datasets == {}  # only a full evaluation fills this cache
    by_hand = EvalDatasetConfig("by hand", f"{file}@[0:1]", n_samples_per_eval_prompt=3)
    results = run(eval_rollout_single_dataset(runtime.plugin_args, 0, by_hand))
    assert results["by hand"]["rewards"] == [2.0] * 3
    assert {body["sampling_params"]["max_new_tokens"] for body in engine.requests} == {8}


def test_evaluation_separates_samples_without_a_reward(engine, make_runtime):
    args = make_runtime([engine.url]).args
    samples = [Sample(index=i, group_index=i, status=Sample.Status.COMPLETED) for i in range(3)]
    result = {"rewards": [1.0, None, 0.0], "truncated": [True, False, False], "samples": samples}
    found = complete_evaluation(args, RolloutFnEvalOutput({"d": result}, {"eval/extra": 5.0}))
    assert found.data["d"]["samples"] == [samples[0], samples[2]]
    assert found.data["d"]["failed"] == [samples[1]]
    assert (found.metrics["eval/d"], found.metrics["eval/d-truncated_ratio"], found.metrics["eval/extra"]) == (
        0.5,
        0.5,
        5.0,
    )
    with pytest.raises(RolloutFailed, match="evaluation on d: none of the 2 samples was scored"):
        complete_evaluation(args, RolloutFnEvalOutput({"d": {"rewards": [None, None]}}))


def test_custom_rollout_metrics_are_added_to_the_default_ones(engine, make_runtime):
    runtime = make_runtime([engine.url])
    sample = Sample(index=0, group_index=0, tokens=[1, 2], response_length=1, reward=0.5, rollout_log_probs=[-1.0])
    seen = []

    def rollout(args, rollout_id, data_source, evaluation=False):
        seen.append(GenerateState(args).rollout_id)
        return RolloutFnTrainOutput([[sample]], {"rollout/mine": 3.0})

    maker = RolloutMaker(runtime, rollout, None, log=lambda *given: None, at_work=nullcontext)
    metrics = maker.get(5).metrics
    assert (metrics["rollout/mine"], metrics["rollout/raw_reward"], seen) == (3.0, 0.5, [5])
