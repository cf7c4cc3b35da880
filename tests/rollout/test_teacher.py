"""Teacher log-probs of sampled tokens, requested over HTTP."""

import asyncio
from argparse import Namespace

import pytest
from aiohttp import web

from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout import on_policy_distillation
from slime.rollout.base_types import leaves
from slime.rollout.outcomes import RolloutFailed
from slime.rollout.rewards.remote import Teacher
from slime.rollout.sglang_rollout import generate_rollout


def scores(body, shift=0):
    """Answer of a served teacher: token t has log-prob -t / 10, the first token has none."""
    start = body["logprob_start_len"]
    tokens = body["input_ids"][start:]
    entries = [[None if i == 0 else -t / 10, t + shift, None] for i, t in enumerate(tokens)]
    return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})


@pytest.fixture
def taught(make_engine, make_runtime, monkeypatch):
    """Makes a runtime, a student engine and a teacher engine that answers with `respond`."""
    monkeypatch.setattr("slime.rollout.rewards.remote.FIRST_BACKOFF_S", 0.01)
    student, served = make_engine(), make_engine()
    teachers = []

    def make(respond, **flags):
        served.respond = respond
        flags = {"use_opd": True, "opd_type": "engine", "rm_url": served.url} | flags
        runtime = make_runtime([student.url], **flags)
        teachers.append((runtime, Teacher.at(f"{served.url}/generate", timeout_s=120, concurrency=2)))
        runtime.state.teacher = teachers[-1][1]
        return runtime, student, served

    yield make
    for runtime, teacher in teachers:
        runtime.run(teacher.aclose())


def test_teacher_scores_every_finished_sample_without_a_reward_function(taught, prompts, tokenizer):
    runtime, student, served = taught(scores)
    student.respond = lambda body: "78</s>"
    output = generate_rollout(runtime.args, 0, prompts(["ab", "c"], n=2))
    response = tokenizer.encode("78</s>", add_special_tokens=False)
    for sample in leaves(output.samples):
        assert sample.teacher_log_probs == [-t / 10 for t in response]
        assert sample.reward == 0.0
    assert len(served.requests) == 4
    for body in served.requests:
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
        assert body["return_logprob"] is True
        assert body["logprob_start_len"] == len(body["input_ids"]) - len(response) - 1


def test_reward_function_still_runs_with_a_teacher(taught, prompts):
    runtime, _, _ = taught(scores, rm_type="f1")
    output = generate_rollout(runtime.args, 0, prompts(["a", "b"], n=1, labels=["7", "8"]))
    assert [sample.reward for sample in leaves(output.samples)] == [1.0, 0.0]


def test_opd_verifier_requires_labels_only_with_a_label_key(taught, prompts):
    runtime, _, _ = taught(scores, rm_type="f1")
    output = generate_rollout(runtime.args, 0, prompts(["a", "b"], n=1, labels=[None, "7"]))
    assert [sample.reward for sample in leaves(output.samples)] == [0.0, 1.0]
    runtime, _, _ = taught(scores, rm_type="math", label_key="label")
    with pytest.raises(UserError, match="--rm-type math compares with a label and this sample has none"):
        generate_rollout(runtime.args, 0, prompts(["a"], n=1, labels=[None]))


def test_teacher_that_returns_other_token_ids_fails_the_samples(taught, prompts):
    runtime, _, _ = taught(lambda body: scores(body, shift=1))
    with pytest.raises(
        RolloutFailed, match=r"engine: EngineProtocolError: .*no meta_info.input_token_logprobs for the 2"
    ):
        generate_rollout(runtime.args, 0, prompts(["a"], n=1))


def test_failed_teacher_request_is_retried(taught, prompts):
    answers = []

    def respond(body):
        answers.append(body)
        return web.Response(status=500) if len(answers) == 1 else scores(body)

    runtime, _, _ = taught(respond)
    (sample,) = leaves(generate_rollout(runtime.args, 0, prompts(["a"], n=1)).samples)
    assert (len(answers), len(sample.teacher_log_probs)) == (2, 2)


def test_teacher_skips_scored_samples_and_empty_responses(taught):
    from slime.rollout.sglang_rollout import generate_and_rm

    runtime, _, served = taught(scores)
    known = Sample(tokens=[1, 2], response_length=1, teacher_log_probs=[-1.0], status=Sample.Status.COMPLETED)
    empty = Sample(tokens=[1], status=Sample.Status.COMPLETED)
    for sample in (known, empty):
        runtime.run(generate_and_rm(runtime.args, sample, runtime.state.sampling_params))
    assert (served.requests, known.teacher_log_probs, empty.teacher_log_probs) == ([], [-1.0], None)


# the two functions documented upstream

RESPONSE = [7, 8, 9]


def teacher_answer(sample_tokens):
    entries = [[None, sample_tokens[-4]], *([-t / 10, t] for t in sample_tokens[-3:])]
    return {"meta_info": {"input_token_logprobs": entries}}


def test_opd_reward_func_answer_is_turned_into_teacher_log_probs(make_engine):
    served = make_engine()
    served.respond = scores
    args = Namespace(rm_url=f"{served.url}/generate", reward_key=None)
    sample = Sample(tokens=[5, 6, *RESPONSE], response_length=3, index=4)
    sample.reward = asyncio.run(on_policy_distillation.reward_func(args, sample))
    assert sample.reward == teacher_answer(sample.tokens)
    failed = Sample(tokens=[5], index=5, status=Sample.Status.FAILED)
    assert on_policy_distillation.post_process_rewards(args, [sample, failed]) == ([0.0, 0.0], [0.0, 0.0])
    assert sample.teacher_log_probs == [-0.7, -0.8, -0.9]
    assert failed.teacher_log_probs is None
    assert asyncio.run(on_policy_distillation.reward_func(args, sample)) == sample.reward
    assert len(served.requests) == 1  # known log-probs are not requested again
    empty = asyncio.run(on_policy_distillation.reward_func(args, Sample(tokens=[5, 6])))
    assert empty == {"meta_info": {"input_token_logprobs": [[None, 6]]}}


def test_opd_functions_require_rm_url_and_input_token_logprobs(make_engine):
    sample = Sample(tokens=[5, 6, *RESPONSE], response_length=3, index=4, reward=1.0)
    args = Namespace(rm_url=None, reward_key=None)
    with pytest.raises(UserError, match="served at --rm-url: name one"):
        asyncio.run(on_policy_distillation.reward_func(args, sample))
    for reward in (1.0, {"meta_info": {}}, teacher_answer([5, 6, 7, 8, 8])):
        sample.reward = reward
        with pytest.raises(UserError, match=r"sample 4: its reward has no meta_info\.input_token_logprobs for its 3"):
            on_policy_distillation.post_process_rewards(args, [sample])


def test_dict_reward_needs_no_reward_key_with_a_post_process_function(make_runtime, engine, prompts):
    reward = "slime.rollout.on_policy_distillation.reward_func"
    after = "slime.rollout.on_policy_distillation.post_process_rewards"
    engine.respond = lambda body: scores(body) if "logprob_start_len" in body else "78</s>"
    flags = {"custom_rm_path": reward, "rm_url": engine.url}
    runtime = make_runtime([engine.url], **flags, custom_reward_post_process_path=after)
    output = generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))
    assert all(isinstance(sample.reward, dict) for sample in leaves(output.samples))
    assert "rollout/raw_reward" not in output.metrics
    without = make_runtime([engine.url], **flags)
    with pytest.raises(UserError, match=r"the reward is a dict with keys \['meta_info'\]; name one with --reward-key"):
        generate_rollout(without.args, 0, prompts(["a", "b"], n=2))
