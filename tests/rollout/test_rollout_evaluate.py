"""Evaluation over datasets, and metrics computed from samples."""

import itertools
import json

import pytest

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.evaluate import read_eval_datasets
from slime.rollout.metrics import RepetitionCache, eval_metrics, has_repetition, pass_at_k, sample_metrics
from slime.rollout.outcomes import RolloutFailed
from slime.rollout.sglang_rollout import generate_rollout


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CORRECT_IF_EVEN = """
def f(args, sample):
    if sample.label == "broken":
        raise ValueError("no verdict")
    return float((sample.index + len(sample.prompt)) % 2 == 0)
"""


@pytest.fixture
def datasets(tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", [{"q": "a", "a": "1"}, {"q": "bc", "a": "2"}])
    other = write_jsonl(tmp_path / "other.jsonl", [{"q": "x", "a": "1"}, {"q": "y", "a": "broken"}])
    return [("short", short), ("other", other)]


def evaluate(runtime):
    output = generate_rollout(runtime.args, 0, None, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    return output


def test_evaluation_uses_eval_sampling_flags_and_reports_each_dataset(engine, make_runtime, datasets, write_plugin):
    engine.respond = lambda body: "12345" if len(body["input_ids"]) == 2 else "7</s>"
    runtime = make_runtime(
        [engine.url],
        eval_prompt_data=datasets,
        eval_input_key="q",
        eval_label_key="a",
        n_samples_per_eval_prompt=4,
        eval_temperature=0.0,
        eval_top_p=0.9,
        eval_top_k=5,
        eval_max_response_len=3,
        eval_min_new_tokens=1,
        custom_rm_path=write_plugin(CORRECT_IF_EVEN),
    )
    output = evaluate(runtime)
    short, other = output.data["short"], output.data["other"]
    assert [sample.index for sample in short["samples"]] == list(range(8))
    # "a" has length 1: odd indices are correct; "bc" has length 2: even indices are
    assert short["rewards"] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert short["truncated"] == [False] * 4 + [True] * 4
    assert (other["rewards"], len(other["failed"])) == ([0.0, 1.0, 0.0, 1.0], 4)
    params = engine.requests[0]["sampling_params"]
    assert [params[key] for key in ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens")] == [
        0.0,
        0.9,
        5,
        3,
        1,
    ]
    metrics = output.metrics
    assert (metrics["eval/short"], metrics["eval/other"]) == (0.5, 0.5)
    assert metrics["eval/short-truncated_ratio"] == 0.5
    assert metrics["eval/short-pass@1"] == 0.5
    assert metrics["eval/short-pass@2"] == pytest.approx(1 - 1 / 6)
    assert metrics["eval/short-pass@4"] == 1.0
    assert "eval/short-pass@8" not in metrics
    assert metrics["eval/short/response_len/mean"] == 2.5
    assert (metrics["eval/short/failed/count"], metrics["eval/other/failed/reward"]) == (0.0, 4.0)


def test_eval_datasets_are_read_once(engine, make_runtime, datasets, tmp_path):
    runtime = make_runtime([engine.url], eval_prompt_data=datasets[:1], input_key="q", label_key="a", rm_type="f1")
    first = evaluate(runtime)
    (tmp_path / "short.jsonl").unlink()
    second = evaluate(runtime)
    assert [s.prompt for s in first.data["short"]["samples"]] == [s.prompt for s in second.data["short"]["samples"]]
    assert all(sample.status is Sample.Status.COMPLETED for sample in second.data["short"]["samples"])


def test_missing_evaluation_data_raises_a_user_error(engine, make_runtime, datasets, tmp_path):
    runtime = make_runtime([engine.url], eval_prompt_data=[*datasets, ("gone", str(tmp_path / "gone.jsonl"))])
    with pytest.raises(UserError):
        evaluate(runtime)
    assert engine.requests == []


def test_evaluation_fails_when_all_samples_fail(make_runtime, datasets):
    runtime = make_runtime(["http://127.0.0.1:9"], eval_prompt_data=datasets, input_key="q", rm_type="random")
    with pytest.raises(RolloutFailed, match=r"evaluation on .*: all 2 samples failed"):
        evaluate(runtime)


def test_dict_reward_is_read_under_eval_reward_key(engine, make_runtime, datasets, write_plugin):
    flags = {
        "eval_prompt_data": datasets[:1],
        "input_key": "q",
        "custom_rm_path": write_plugin("def f(args, sample):\n    return {'score': -1, 'acc': 1}\n"),
    }
    assert evaluate(make_runtime([engine.url], eval_reward_key="acc", **flags)).metrics["eval/short"] == 1.0
    with pytest.raises(UserError, match="--reward-key"):
        evaluate(make_runtime([engine.url], **flags))


def brute_force_pass_at_k(group, k):
    draws = list(itertools.combinations(group, k))
    return sum(any(draw) for draw in draws) / len(draws)


def test_pass_at_k_equals_counting_all_draws():
    groups = [[True, False, False, False, True], [False] * 5, [True] * 5, [False, True, False, False, False]]
    values = pass_at_k(groups)
    assert list(values) == ["pass@1", "pass@2", "pass@4"]
    for k in (1, 2, 4):
        expected = sum(brute_force_pass_at_k(group, k) for group in groups) / len(groups)
        assert values[f"pass@{k}"] == pytest.approx(expected)


def test_pass_at_k_skips_groups_smaller_than_k():
    assert pass_at_k([[True], [False, False]]) == {"pass@1": 0.5, "pass@2": 0.0}
    assert pass_at_k([]) == {}


def test_eval_metrics_group_samples_by_group_index():
    samples = [Sample(group_index=i % 2, response_length=1) for i in range(4)]
    data = {"d": {"rewards": [1.0, 0.0, 0.0, 0.0], "truncated": [False] * 4, "samples": samples}}
    metrics = eval_metrics(None, data)
    assert (metrics["eval/d-pass@1"], metrics["eval/d-pass@2"]) == (0.25, 0.5)


def test_sample_metrics_exclude_failed_samples():
    samples = [
        Sample(response_length=4, loss_mask=[1, 1, 0, 0], status=Sample.Status.COMPLETED, response="abcd"),
        Sample(response_length=8, status=Sample.Status.TRUNCATED, response="x" * 5000),
        Sample(response_length=99, status=Sample.Status.FAILED, failure="engine: EngineTimeout: late"),
    ]
    samples[0].prefix_cache_info.add({"cached_tokens": 3, "prompt_tokens": 4})
    samples[1].prefix_cache_info.add({"cached_tokens": 0, "prompt_tokens": 8})
    assert sample_metrics(samples) == {
        "failed/count": 1.0,
        "failed/engine": 1.0,
        "response_len/mean": 5.0,
        "response_len/median": 5.0,
        "response_len/max": 8.0,
        "response_len/min": 2.0,
        "truncated_ratio": 0.5,
        "repetition_frac": 0.5,
        "prefix_cache_hit_rate": 0.25,
        "avg_cached_tokens_per_sample": 1.5,
    }


def test_has_repetition_detects_repeated_text():
    assert has_repetition("again " * 1000)
    assert not has_repetition("a normal sentence of a few words")
    assert not has_repetition("")


def test_cached_repetition_is_recomputed_for_a_changed_response():
    again, other = Sample(response="again " * 1000), Sample(response="a normal sentence")
    noted = RepetitionCache()
    for sample in (again, other):
        noted.note(sample)
    some = noted.only([again])
    assert (noted(again), noted(other), some(again), some(other)) == (True, False, True, False)
    again.response, other.response = other.response, again.response
    assert (noted(again), noted(other), some(again), some(other)) == (False, True, False, True)


def test_eval_metrics_accept_rewards_without_samples():
    assert eval_metrics(None, {"x": {"rewards": [1.0, 0.0]}}) == {"eval/x": 0.5}


EVAL_CONFIG = """
eval:
  defaults: {{input_key: q, label_key: a, n_samples_per_eval_prompt: 2}}
  datasets:
    typed: {{path: {short}, rm_type: f1, temperature: 0.25, max_response_len: 4, metadata_overrides: {{lang: en}}}}
    own: {{path: {short}, custom_rm_path: "{rm}", custom_generate_function_path: "{generate}"}}
"""


@pytest.mark.parametrize("group_rm", [False, True])
def test_eval_config_sets_reward_and_generate_functions_per_dataset(
    engine, make_runtime, datasets, write_plugin, tmp_path, group_rm
):
    generate = write_plugin(
        "async def f(args, sample, sampling_params, evaluation=False):\n"
        "    assert evaluation\n    sample.tokens, sample.response = [1], 'made'\n"
        "    sample.status = sample.Status.COMPLETED\n    return sample\n",
        "generate",
    )
    rm = write_plugin("def f(args, sample):\n    return float(len(sample.response))\n", "rm")
    training = write_plugin("def f(args, samples):\n    return [9.0] * len(samples)\n", "training")
    file = tmp_path / "eval.yaml"
    file.write_text(EVAL_CONFIG.format(short=datasets[0][1], rm=rm, generate=generate))
    engine.respond = lambda body: "1"
    runtime = make_runtime(
        [engine.url],
        eval_config=str(file),
        eval_prompt_data=[("plain", datasets[0][1])],
        eval_input_key="q",
        custom_rm_path=training,
        group_rm=group_rm,
    )
    output = evaluate(runtime)
    assert list(output.data) == ["plain", "typed", "own"]
    assert output.data["plain"]["rewards"] == [9.0, 9.0]
    assert output.data["typed"]["rewards"] == [1.0, 1.0, 0.0, 0.0]  # f1 score against the labels 1 and 2
    assert output.data["own"]["rewards"] == [4.0] * 4
    assert output.metrics["eval/typed"] == 0.5
    assert [sample.metadata["lang"] for sample in output.data["typed"]["samples"]] == ["en"] * 4
    asked = {(r["sampling_params"]["temperature"], r["sampling_params"]["max_new_tokens"]) for r in engine.requests}
    assert asked == {(1.0, 8), (0.25, 4)}
    assert len(engine.requests) == 2 + 4


def test_nan_reward_stops_the_evaluation(engine, make_runtime, datasets, write_plugin):
    path = write_plugin(
        "async def f(args, sample, sampling_params):\n    sample.tokens, sample.reward = [1], float('nan')\n"
        "    sample.status = sample.Status.COMPLETED\n    return sample\n"
    )
    runtime = make_runtime(
        [engine.url], eval_prompt_data=datasets[:1], eval_input_key="q", custom_generate_function_path=path
    )
    with pytest.raises(UserError, match=r"sample 0: the generate function .* gave the reward nan"):
        evaluate(runtime)


def test_label_the_verifier_cannot_compare_is_rejected_with_its_row(make_runtime, tmp_path):
    path = write_jsonl(tmp_path / "sums.jsonl", [{"q": "a", "a": "1"}, {"q": "b", "a": {"value": 2}}])
    flags = {"eval_prompt_data": [("sums", path)], "eval_input_key": "q", "eval_label_key": "a"}
    runtime = make_runtime([], **flags, rm_type="math")
    with pytest.raises(UserError, match=r"sums\.jsonl:2: the label must be a text"):
        read_eval_datasets(runtime.args, runtime.tokenizer)
    free = make_runtime([], **flags, custom_rm_path="mine.f")
    assert read_eval_datasets(free.args, free.tokenizer)["sums"].prompts[1].label == {"value": 2}
