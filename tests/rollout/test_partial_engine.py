"""Partial rollouts with the embedded engine: each part has the log-probs of the weights that sampled it."""

import asyncio
import time

import pytest

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.rollout.base_types import leaves
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import generate_and_rm_group
from slime.rollout.sglang_rollout import generate_and_rm, generate_rollout
from slime.utils.http_utils import post
from tests.engine.conftest import EngineProcess
from tests.tiny_models import make_model_folder

LONG = 200
TOOL_RESULT = " the answer is 46. "

GENERATE = f"""
import asyncio
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import get, post

async def turn(args, sample, sampling_params, **own):
    url = f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}/generate"
    params = {{**sampling_params, "ignore_eos": True, **own}}
    answer = await post(url, {{"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}})
    log_probs, tokens, _ = zip(*answer["meta_info"]["output_token_logprobs"])
    sample.append_response_tokens(
        args, tokens=tokens, log_probs=log_probs, meta_info=answer["meta_info"], text=answer["text"]
    )

async def busy(args):
    url = f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}/server_info"
    while not (await get(url))["num_running_reqs"]:
        await asyncio.sleep(0.005)

async def f(args, sample, sampling_params, evaluation=False):
    encode = GenerateState(args).tokenizer.encode
    sample.tokens = encode(sample.prompt)
    if sample.prompt == "short":
        if not evaluation and not args.carried["alone"]:
            await args.carried["second_turn"].wait()
            await busy(args)
        await turn(args, sample, sampling_params, max_new_tokens=8)
        return sample
    await turn(args, sample, sampling_params, max_new_tokens=6)
    await asyncio.sleep(0.01)
    sample.append_response_tokens(args, tokens=encode("{TOOL_RESULT}"), trainable=False, text="{TOOL_RESULT}")
    args.carried["second_turn"].set()
    await turn(args, sample, sampling_params, max_new_tokens={LONG})
    return sample
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model with two sets of weights."""
    place = tmp_path_factory.mktemp("models")
    return [make_model_folder(place / f"seed_{seed}", seed=seed, max_position_embeddings=2048) for seed in (0, 1)]


@pytest.fixture(scope="module")
def real_engine(folders, tmp_path_factory):
    running = EngineProcess(folders[0], tmp_path_factory.mktemp("engine") / "log")
    yield running
    assert running.stop() == 0


@pytest.fixture
def weights(real_engine, folders):
    """`weights(i)` loads set i as version i; set 0 is loaded initially."""

    def load(i):
        body = {"model_path": str(folders[i]), "weight_version": str(i)}
        assert real_engine.post("/update_weights_from_disk", body)[0] == 200

    load(0)
    return load


@pytest.fixture
def make_partial(real_engine, folders, write_plugin):
    runtimes = []

    def make(alone=False, **flags):
        carried = {"second_turn": asyncio.Event(), "alone": alone}
        config = Config(
            hf_checkpoint=str(folders[0]),
            num_rollout=1,
            device="cpu",
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            rollout_max_response_len=LONG,
            custom_generate_function_path=write_plugin(GENERATE, "generate"),
            custom_rm_path=write_plugin("def f(args, sample):\n    return 1.0\n", "reward"),
            carried=carried,
            **flags,
        )
        shown = {"api_key": real_engine.key, "is_open": True}
        runtimes.append(RolloutRuntime(derive(config), [real_engine.url], dispatch=generate_and_rm_group, **shown))
        return runtimes[-1]

    yield make
    for runtime in runtimes:
        runtime.close()


def scores(engine, tokens):
    """Return the log-prob of every token but the first under the currently loaded weights."""
    params = {"max_new_tokens": 0, "temperature": 1.0}
    answer = engine.generate(input_ids=tokens, sampling_params=params, return_logprob=True, logprob_start_len=0)
    return [log_prob for log_prob, _, _ in answer["meta_info"]["input_token_logprobs"]][1:]


@pytest.mark.parametrize("masked", [False, True])
def test_aborted_turn_has_the_log_probs_of_the_weights_that_sampled_it(
    real_engine, make_partial, weights, prompts, masked
):
    whole_runtime = make_partial(alone=True)
    [whole] = leaves(generate_rollout(whole_runtime.args, 0, prompts(["long"], n=1)).samples)
    flags = {"over_sampling_batch_size": 2, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": masked}
    for _ in range(5):  # retry if the long request finished before it could be aborted
        runtime = make_partial(**flags)
        source = prompts(["long", "short"], n=1)
        output = generate_rollout(runtime.args, 0, source)
        if output.metrics["rollout/held_groups"]:
            break
    assert [sample.prompt for sample in leaves(output.samples)] == ["short"]
    assert (output.metrics["rollout/held_groups"], output.metrics["rollout/thrown_away_tokens"]) == (1.0, 0.0)
    assert real_engine.get("/server_info")[1]["num_running_reqs"] == 0
    weights(1)
    evaluated = generate_and_rm(runtime.args, Sample(prompt="short"), dict(runtime.state.sampling_params), True)
    assert runtime.run(evaluated, 240).response_length == 8
    output = generate_rollout(runtime.args, 1, source)
    assert output.metrics["rollout/thrown_away_tokens"] == 0.0

    [sample] = leaves(output.samples)
    between = len(runtime.tokenizer.encode(TOOL_RESULT))
    [(_, first), (_, second), (old, kept), (new, rest)] = sample.version_spans
    assert (first, second, old, new, kept + rest) == (6, between, "0", "1", LONG)
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 6 + between + LONG)
    start = sample.prompt_length
    cut = start + 6 + between + kept
    assert sample.tokens[:cut] == whole.tokens[:cut]
    assert sample.tokens != whole.tokens
    sampled = sample.rollout_log_probs
    assert scores(real_engine, sample.tokens)[cut - 1 :] == pytest.approx(sampled[cut - start :], abs=1e-3)
    weights(0)
    before = scores(real_engine, sample.tokens)[start - 1 : cut - 1]
    assert before[:6] == pytest.approx(sampled[:6], abs=1e-3)
    assert before[6 + between :] == pytest.approx(sampled[6 + between : cut - start], abs=1e-3)
    assert sample.loss_mask == [int(not masked)] * 6 + [0] * between + [int(not masked)] * kept + [1] * rest


def test_post_resumes_after_a_weight_update_aborts_its_request(real_engine, make_partial, weights):
    runtime = make_partial()
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": LONG, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True},
        "return_logprob": True,
    }
    for _ in range(5):  # retry if the request finished before the engine was paused
        weights(0)
        asked = asyncio.run_coroutine_threadsafe(post(f"{real_engine.url}/generate", body), runtime.loop_thread.loop)
        while not asked.done() and not real_engine.get("/server_info")[1]["num_running_reqs"]:
            time.sleep(0.005)
        assert real_engine.post("/pause_generation", {"mode": "abort"})[0] == 200
        weights(1)
        assert real_engine.post("/continue_generation", {})[0] == 200
        answer = asked.result(240)
        if answer["meta_info"]["weight_version"] == "1":
            break
    meta_info = answer["meta_info"]
    assert len(answer["output_ids"]) == meta_info["completion_tokens"] == LONG
    assert (meta_info["prompt_tokens"], meta_info["weight_version"]) == (3, "1")
    assert (meta_info["finish_reason"]["type"], answer["text"]) == (
        "length",
        runtime.tokenizer.decode(answer["output_ids"], skip_special_tokens=True),
    )
    *_, new = meta_info["weight_versions"]
    assert (new["version"], new["end"]) == ("1", LONG)
    sampled = [log_prob for log_prob, _, _ in meta_info["output_token_logprobs"]]
    found = scores(real_engine, [5, 6, 7, *answer["output_ids"]])[2 + new["start"] :]
    assert found == pytest.approx(sampled[new["start"] :], abs=1e-3)
