"""Complete training rollouts: groups, plugins, rewards, and failures as outcomes."""

import asyncio
import copy
import json
import logging

import pytest
from aiohttp import web

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn, leaves
from slime.rollout.metrics import tail_seconds
from slime.rollout.outcomes import RolloutFailed
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_rollout

REWARD_BY_LENGTH = "async def f(args, sample):\n    return float(len(sample.response))\n"


def rollout(runtime, source, rollout_id=3):
    output = generate_rollout(runtime.args, rollout_id, source)
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def test_rollout_returns_sorted_groups_with_rewards_and_metrics(engine, make_runtime, prompts, write_plugin):
    async def slow_first(body):
        if len(engine.requests) == 1:
            await asyncio.sleep(0.2)
        return {"text": "7</s>", "cached": 1}

    engine.respond = slow_first
    runtime = make_runtime([engine.url], custom_rm_path=write_plugin(REWARD_BY_LENGTH), rollout_num_gpus=1)
    output = rollout(runtime, prompts(["1+1=", "2+2="], n=2))
    samples = list(leaves(output.samples))
    assert [len(group) for group in output.samples] == [2, 2]
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    assert [sample.reward for sample in samples] == [1.0] * 4
    assert len({sample.session_id for sample in samples}) == 4
    metrics = output.metrics
    assert metrics["rollout/raw_reward"] == 1.0
    assert metrics["rollout/response_len/mean"] == 2.0
    assert metrics["rollout/truncated_ratio"] == 0.0
    assert metrics["rollout/failed/count"] == 0.0
    assert metrics["rollout/zero_std/count"] == 2.0
    assert metrics["rollout/zero_std/count_1.0"] == 2.0
    assert metrics["rollout/prefix_cache_hit_rate"] == 0.25
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(8 / metrics["perf/rollout_time"])
    assert 0.0 < metrics["perf/rollout_tail_time"] < metrics["perf/rollout_time"]


def test_gate_is_open_only_during_a_rollout(engine, make_runtime, prompts, write_plugin):
    runtime = make_runtime([engine.url], custom_rm_path=write_plugin(REWARD_BY_LENGTH))
    gate, while_sampling = runtime.state.gate, []

    async def note(body):
        while_sampling.append(gate.is_open)
        return {"text": "7</s>"}

    engine.respond = note
    for rollout_id in range(2):
        rollout(runtime, prompts(["1+1=", "2+2="], n=1), rollout_id)
        assert not gate.is_open, "all groups have ended, and requests of other processes are still to be held"
    assert while_sampling == [True] * 4


def test_rollout_tail_starts_after_90_percent_of_the_groups():
    assert tail_seconds([*range(18), 30.0, 50.0], now=51.0) == 51.0 - 17
    assert tail_seconds([4.0, 1.0], now=6.0) == 5.0, "rounded down"
    assert tail_seconds([4.0], now=6.0) == 2.0, "at least one"
    assert tail_seconds([], now=6.0) == 0.0


def test_sampling_seeds_are_distinct_and_reproducible(engine, make_runtime, prompts):
    seeds = []
    for _ in range(2):
        engine.requests.clear()
        runtime = make_runtime([engine.url], rm_type="random")
        rollout(runtime, prompts(["a", "b"], n=2))
        seeds.append(sorted(request["sampling_params"]["sampling_seed"] for request in engine.requests))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


ASKS_FOUR_TIMES = """
import asyncio
from slime.rollout.sglang_rollout import generate
from slime.utils.http_utils import post

async def f(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    request = {"input_ids": [1, 2], "sampling_params": sampling_params, "return_logprob": True}
    await asyncio.gather(post(url, request), post(url, request))
    await post(url, {**request, "sampling_params": {**sampling_params, "sampling_seed": 5}})
    return await generate(args, sample, sampling_params)
"""


def test_equal_requests_get_distinct_and_reproducible_seeds(engine, make_runtime, prompts, write_plugin):
    seeds = []
    for _ in range(2):
        engine.requests.clear()
        path = write_plugin(ASKS_FOUR_TIMES, "asks")
        runtime = make_runtime([engine.url], rm_type="random", custom_generate_function_path=path)
        rollout(runtime, prompts(["a"], n=2))
        seeds.append(sorted(request["sampling_params"]["sampling_seed"] for request in engine.requests))
    assert seeds[0] == seeds[1]
    assert seeds[0].count(5) == 2
    assert len(set(seeds[0])) == 7


def test_groups_stay_on_one_engine(make_engine, make_runtime, prompts):
    engines = [make_engine(), make_engine()]
    runtime = make_runtime(
        [engine.url for engine in engines], rm_type="random", rollout_batch_size=4, n_samples_per_prompt=3
    )
    rollout(runtime, prompts(["a", "b", "c", "d"], n=3))
    served = [sorted({tuple(request["input_ids"]) for request in engine.requests}) for engine in engines]
    assert [len(engine.requests) for engine in engines] == [6, 6]
    assert not set(served[0]) & set(served[1])


def test_plugins_reach_several_engines_through_the_router(make_engine, make_runtime, prompts, write_plugin):
    engines = [make_engine(), make_engine()]
    path = write_plugin(
        "from slime.utils.http_utils import post\n"
        "async def f(args, sample, sampling_params):\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}/generate'\n"
        "    body = {'input_ids': [1], 'sampling_params': sampling_params, 'return_logprob': True}\n"
        "    answer = await post(url, body, headers={'X-SMG-Routing-Key': str(sample.group_index)})\n"
        "    sample.tokens, sample.reward = [1], 1.0\n"
        "    pairs = answer['meta_info']['output_token_logprobs']\n"
        "    sample.append_response_tokens(args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs],\n"
        "                                  text=answer['text'], meta_info=answer['meta_info'])\n"
        "    return sample\n"
    )
    runtime = make_runtime([engine.url for engine in engines], custom_generate_function_path=path)
    output = rollout(runtime, prompts(["a", "b"], n=2))
    assert [sample.response for sample in leaves(output.samples)] == ["7</s>"] * 4
    assert [len(engine.requests) for engine in engines] == [2, 2]


def test_router_address_of_a_single_engine_is_the_engine(engine, make_runtime):
    args = make_runtime([engine.url]).args
    assert f"http://{args.sglang_router_ip}:{args.sglang_router_port}" == engine.url


def test_evaluation_argument_is_passed_only_if_accepted(engine, make_runtime, prompts, write_plugin):
    plain = "async def f(args, sample, sampling_params):\n"
    asking = "async def f(args, sample, sampling_params, evaluation=None):\n    sample.metadata['e'] = evaluation\n"
    body = (
        "    sample.tokens, sample.reward = [1], 0.5\n    sample.status = sample.Status.COMPLETED\n    return sample\n"
    )
    runtime = make_runtime([engine.url], custom_generate_function_path=write_plugin(plain + body, "plain"))
    source = prompts(["a"], n=2)
    source.groups[0][1].generate_function_path = write_plugin(asking + body, "asking")
    first, second = leaves(rollout(runtime, source).samples)
    assert (first.metadata, first.reward) == ({}, 0.5)
    assert (second.metadata, second.reward) == ({"e": False}, 0.5)
    assert engine.requests == []


FLAKY_GENERATE = """
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    if sample.index in args.carried["bad"]:
        sample.tokens, sample.response_length = [1, 2, 3], 7
        raise KeyError(f"tool {sample.index}")
    return await generate(args, sample, sampling_params)
"""


def test_generate_function_that_raises_fails_only_its_sample(engine, make_runtime, prompts, write_plugin, caplog):
    path = write_plugin(FLAKY_GENERATE)
    runtime = make_runtime([engine.url], custom_generate_function_path=path, rm_type="random", carried={"bad": [1, 2]})
    with caplog.at_level(logging.ERROR):
        output = rollout(runtime, prompts(["a", "b"], n=2))
    failed = [sample for sample in leaves(output.samples) if sample.status is Sample.Status.FAILED]
    assert [(s.index, s.failure, s.remove_sample, s.reward) for s in failed] == [
        (1, "generate: KeyError: 'tool 1'", True, None),
        (2, "generate: KeyError: 'tool 2'", True, None),
    ]
    assert all((s.tokens, s.response_length, s.loss_mask) == ([], 0, None) for s in failed)
    assert output.metrics["rollout/failed/count"] == 2.0
    assert output.metrics["rollout/failed/generate"] == 2.0
    assert output.metrics["rollout/response_len/min"] == 2.0
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert runtime.failures.counts == {"generate": 2}


def test_reward_function_that_raises_fails_only_its_sample(engine, make_runtime, prompts, write_plugin):
    path = write_plugin(
        "def f(args, sample):\n    if sample.index == 0:\n        raise ValueError('no verdict')\n    return 1\n"
    )
    output = rollout(make_runtime([engine.url], custom_rm_path=path), prompts(["a", "b"], n=2))
    first, *others = leaves(output.samples)
    assert (first.status, first.failure) == (Sample.Status.FAILED, "reward: ValueError: no verdict")
    assert (first.reward, first.remove_sample, first.response) == (None, True, "7")
    assert [(s.reward, s.status) for s in others] == [(1.0, Sample.Status.COMPLETED)] * 3
    assert output.metrics["rollout/raw_reward"] == 1.0


def test_rejected_engine_request_fails_its_sample(engine, make_runtime, prompts):
    def respond(body):
        refused = len(body["input_ids"]) > 2
        return web.json_response({"error": {"message": "too long"}}, status=400) if refused else "7</s>"

    engine.respond = respond
    output = rollout(make_runtime([engine.url], rm_type="random"), prompts(["a", "long"], n=1))
    good, bad = leaves(output.samples)
    assert good.status is Sample.Status.COMPLETED
    assert bad.failure.startswith("engine: EngineRejected: ")
    assert bad.failure.endswith("/generate was refused with status 400: too long")


def test_rollout_without_a_successful_sample_raises(engine, make_runtime, prompts, write_plugin):
    path = write_plugin("def f(args, sample):\n    raise ValueError('no verdict')\n")
    runtime = make_runtime([engine.url], custom_rm_path=path)
    with pytest.raises(RolloutFailed, match=r"rollout 3: all 4 samples failed; the first one: reward: ValueError: no"):
        rollout(runtime, prompts(["a", "b"], n=2))
    with pytest.raises(RolloutFailed, match="handed out nothing"):
        rollout(runtime, prompts([], n=2))


def test_unreachable_engine_is_named_in_the_error(make_runtime, prompts):
    runtime = make_runtime(["http://127.0.0.1:9"], rm_type="random")
    with pytest.raises(RolloutFailed, match=r"engine: EngineUnreachable: engine http://127.0.0.1:9: /generate"):
        rollout(runtime, prompts(["a", "b"], n=2))


def test_user_error_stops_the_rollout(engine, make_runtime, prompts):
    with pytest.raises(UserError, match="nonsense"):
        rollout(make_runtime([engine.url], rm_type="nonsense"), prompts(["a", "b"], n=2))


def test_generate_function_that_returns_none_is_rejected(engine, make_runtime, prompts, write_plugin):
    runtime = make_runtime(
        [engine.url],
        rm_type="random",
        custom_generate_function_path=write_plugin("async def f(args, sample, sampling_params):\n    pass\n"),
    )
    with pytest.raises(RolloutFailed, match="must return a Sample or a list of them, not None"):
        rollout(runtime, prompts(["a"], n=1))


FAN_OUT = """
import copy
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    siblings = [sample, copy.deepcopy(sample)]
    for i, sibling in enumerate(siblings):
        sibling.rollout_id = args.carried["ids"][i]
    return siblings
"""


@pytest.mark.parametrize("group_rm", [False, True])
def test_fan_out_siblings_are_scored_together(engine, make_runtime, prompts, write_plugin, group_rm):
    reward = "async def f(args, samples):\n    return [float(len(samples))] * len(samples)\n"
    runtime = make_runtime(
        [engine.url],
        custom_generate_function_path=write_plugin(FAN_OUT, "fan"),
        custom_rm_path=write_plugin(reward, "reward"),
        group_rm=group_rm,
        carried={"ids": [None, None]},
    )
    output = rollout(runtime, prompts(["a", "b"], n=2))
    assert [[len(siblings) for siblings in group] for group in output.samples] == [[2, 2], [2, 2]]
    assert [sample.rollout_id for sample in leaves(output.samples)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {sample.reward for sample in leaves(output.samples)} == {4.0 if group_rm else 2.0}


def test_fan_out_siblings_share_the_rollout_id_of_their_origin(engine, make_runtime, prompts, write_plugin):
    runtime = make_runtime(
        [engine.url], custom_generate_function_path=write_plugin(FAN_OUT), rm_type="random", carried={"ids": [4, 5]}
    )
    output = rollout(runtime, prompts(["a", "b"], n=1))
    assert [sample.rollout_id for sample in leaves(output.samples)] == [0, 0, 1, 1]


def test_group_reward_receives_the_group_without_failed_samples(engine, make_runtime, prompts, write_plugin):
    reward = "def f(args, samples):\n    return [s.index - min(t.index for t in samples) for s in samples]\n"
    runtime = make_runtime(
        [engine.url],
        custom_generate_function_path=write_plugin(FLAKY_GENERATE, "flaky"),
        custom_rm_path=write_plugin(reward, "reward"),
        group_rm=True,
        n_samples_per_prompt=3,
        carried={"bad": [0]},
    )
    samples = list(leaves(rollout(runtime, prompts(["a", "b"], n=3)).samples))
    assert [sample.reward for sample in samples] == [None, 0.0, 1.0, 0.0, 1.0, 2.0]


def test_hooks_run_between_generation_and_reward(engine, make_runtime, prompts, write_plugin):
    upper = "def f(args, sample, *, rollout_id=None):\n    sample.response += f'r{rollout_id}'\n"
    other = (
        "import copy\nasync def f(args, sample, evaluation=False):\n"
        "    if sample.index == 1:\n        raise OSError('disk')\n"
        "    sample = copy.deepcopy(sample)\n    sample.metadata['e'] = evaluation\n    return sample\n"
    )
    runtime = make_runtime(
        [engine.url],
        rollout_sample_hook_path=[write_plugin(upper, "upper"), write_plugin(other, "other")],
        custom_rm_path=write_plugin(REWARD_BY_LENGTH, "reward"),
    )
    first, second = leaves(rollout(runtime, prompts(["a"], n=2)).samples)
    assert (first.response, first.reward, first.metadata) == ("7r3", 3.0, {"e": False})
    assert (second.failure, second.reward) == ("hook: OSError: disk", None)


def test_sample_filter_receives_all_groups(engine, make_runtime, prompts, write_plugin):
    path = write_plugin("def f(args, groups):\n    groups[1][0].remove_sample = True\n")
    runtime = make_runtime([engine.url], rollout_sample_filter_path=path, rm_type="random")
    output = rollout(runtime, prompts(["a", "b"], n=1))
    assert [sample.remove_sample for sample in leaves(output.samples)] == [False, True]


def test_finished_samples_are_only_scored_and_failed_ones_restart(engine, make_runtime):
    runtime = make_runtime([engine.url], rm_type="random")
    done = Sample(prompt="a", tokens=[1, 2], response_length=1, loss_mask=[1], status=Sample.Status.TRUNCATED)
    runtime.run(generate_and_rm(runtime.args, done, runtime.state.sampling_params))
    assert (engine.requests, done.tokens, done.reward is None) == ([], [1, 2], False)
    failed = Sample(prompt="a", tokens=[9], status=Sample.Status.FAILED, failure="x", remove_sample=True)
    runtime.run(generate_and_rm(runtime.args, failed, runtime.state.sampling_params))
    assert (failed.status, failed.failure, failed.remove_sample) == (Sample.Status.COMPLETED, None, False)


def test_aborted_rollout_sends_no_new_requests(engine, make_runtime):
    runtime = make_runtime([engine.url], rm_type="random")
    runtime.state.aborted = True
    sample = runtime.run(generate_and_rm(runtime.args, Sample(prompt="a"), runtime.state.sampling_params))
    assert (sample.status, sample.reward, engine.requests) == (Sample.Status.ABORTED, None, [])


def test_sglang_server_concurrency_limits_running_requests(engine, make_runtime, prompts):
    running, most = 0, 0

    async def respond(body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await engine.when(lambda: most >= 3, None)
        await asyncio.sleep(0.01)
        running -= 1
        return "7</s>"

    engine.respond = respond
    runtime = make_runtime([engine.url], rm_type="random", sglang_server_concurrency=3, n_samples_per_prompt=8)
    rollout(runtime, prompts(["a", "b"], n=8))
    assert most == 3


def test_generate_state_is_one_object_per_args(engine, make_runtime):
    first, second = make_runtime([engine.url]), make_runtime([engine.url])
    assert GenerateState(first.args) is GenerateState(first.args) is GenerateState(first.config)
    assert GenerateState(first.args) is not GenerateState(second.args)
    assert GenerateState(first.args).tokenizer is first.tokenizer
    assert GenerateState(copy.deepcopy(first.plugin_args)) is first.state
    first.close()
    with pytest.raises(LookupError, match="no rollout is running for these args"):
        GenerateState(first.plugin_args)


def test_bare_results_of_rollout_functions_are_wrapped():
    output = call_rollout_fn(lambda a, r, d, evaluation: [[r]], None, 5, None, evaluation=False)
    assert output.samples == [[5]]
    assert call_rollout_fn(lambda a, r, d, evaluation: {"x": {}}, None, 5, None, evaluation=True).data == {"x": {}}


def test_rollout_reads_a_real_data_source(engine, make_runtime, tmp_path):
    from slime.data.source import RolloutDataSource

    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(4)))
    engine.respond = lambda body: "\\boxed{2}"
    runtime = make_runtime(
        [engine.url],
        prompt_data=str(path),
        label_key="label",
        apply_chat_template=True,
        rm_type="math",
        rollout_max_response_len=16,
        rollout_batch_size=3,
    )
    output = rollout(runtime, RolloutDataSource(runtime.args))
    assert [[sample.reward for sample in group] for group in output.samples] == [[0.0] * 2, [1.0] * 2, [0.0] * 2]
    assert [group[0].prompt for group in output.samples] == [f"<user>{i}+1=</s>\n<assistant>" for i in range(3)]
    assert output.metrics["rollout/raw_reward"] == pytest.approx(1 / 3)


def test_engine_url_without_a_port_is_rejected(make_runtime):
    with pytest.raises(ValueError, match="needs a host and a port"):
        make_runtime(["http://somewhere"])
