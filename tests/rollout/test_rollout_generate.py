"""The default generate: tokens, log-probs, limits, continuation, retries."""

from contextlib import nullcontext

import pytest
from aiohttp import web

from slime.data.sample import Sample
from slime.engine.http.client import EngineFailed, EngineRejected, EngineUnreachable
from slime.engine.http.protocol import sampling_seed
from slime.rollout.gate import AbortedTooOften, as_evaluation
from slime.rollout.generate import PromptFillsContext, generate
from slime.rollout.sample_pipeline import generate_and_rm_group


def run_generate(runtime, sample, **params):
    sampling_params = {**runtime.state.sampling_params, **params}
    return runtime.run(generate(runtime, sample, sampling_params), 120)


def test_tokens_log_probs_and_status_come_from_the_engine(engine, make_runtime, tokenizer):
    runtime = make_runtime([engine.url], rollout_temperature=0.5, rollout_stop=["!"])
    sample = run_generate(runtime, Sample(prompt="1+2=", group_index=0, index=0))
    prompt_ids, answer_ids = tokenizer.encode("1+2="), tokenizer.encode("7</s>")
    assert sample.tokens == prompt_ids + answer_ids
    assert (sample.response, sample.response_length, sample.loss_mask) == ("7", 2, [1, 1])
    assert sample.rollout_log_probs == [-t / 100 for t in answer_ids]
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["1"])
    [request] = engine.requests
    assert (request["input_ids"], request["return_logprob"]) == (prompt_ids, True)
    assert request["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop": ["!"],
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_chat_template_is_applied_once(engine, make_runtime, tokenizer):
    runtime = make_runtime([engine.url])
    sample = run_generate(runtime, Sample(prompt=[{"role": "user", "content": "hi"}]))
    assert engine.requests[0]["input_ids"] == tokenizer.encode("<user>hi</s>\n<assistant>", add_special_tokens=False)
    assert tokenizer.decode(sample.tokens) == "<user>hi</s>\n<assistant>7</s>"


def test_response_at_max_new_tokens_is_truncated(engine, make_runtime):
    engine.respond = lambda body: "0123456789"
    runtime = make_runtime([engine.url])
    sample = run_generate(runtime, Sample(prompt="x"))
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 8)


def test_context_length_limits_new_tokens(engine, make_runtime):
    engine.respond = lambda body: "0123456789"
    runtime = make_runtime([engine.url], rollout_max_context_len=7)
    sample = run_generate(runtime, Sample(prompt="abcd"))
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 3
    assert len(sample.tokens) == 7


def test_evaluation_uses_eval_max_context_len(engine, make_runtime):
    engine.respond = lambda body: "0123456789"
    runtime = make_runtime([engine.url], rollout_max_context_len=7, eval_max_context_len=6)
    for evaluates, expected in ((False, 3), (True, 2)):
        with as_evaluation() if evaluates else nullcontext():
            sample = run_generate(runtime, Sample(prompt="abcd"))
        assert engine.requests[-1]["sampling_params"]["max_new_tokens"] == expected
        assert len(sample.tokens) == 4 + expected


def test_prompt_that_fills_the_context_is_rejected(engine, make_runtime):
    runtime = make_runtime([engine.url], rollout_max_context_len=4)
    with pytest.raises(PromptFillsContext, match=r"4 tokens, the context \(rollout_max_context_len\) 4"):
        run_generate(runtime, Sample(prompt="abcd"))
    assert engine.requests == []


def partial_sample(tokenizer):
    sample = Sample(prompt="ab", tokens=tokenizer.encode("ab"), group_index=0, index=0)
    sample.append_response_tokens(
        tokens=tokenizer.encode("cde"),
        log_probs=[-0.1, -0.2, -0.3],
        text="cde",
        meta_info={"finish_reason": {"type": "abort"}, "weight_version": "0"},
    )
    return sample


def test_partial_sample_is_continued_from_its_tokens(engine, make_runtime, tokenizer):
    runtime = make_runtime([engine.url])
    sample = run_generate(runtime, partial_sample(tokenizer), sampling_seed=5, min_new_tokens=4)
    request = engine.requests[0]
    assert request["input_ids"] == tokenizer.encode("abcde")
    assert request["sampling_params"]["max_new_tokens"] == 5
    assert request["sampling_params"]["min_new_tokens"] == 1
    assert request["sampling_params"]["sampling_seed"] == sampling_seed(5, 3)
    assert (sample.response, sample.response_length) == ("cde7", 5)
    assert sample.rollout_log_probs[:3] == [-0.1, -0.2, -0.3]
    assert (sample.weight_versions, sample.status) == (["0", "1"], Sample.Status.COMPLETED)


def test_partial_sample_at_its_limit_is_truncated_without_a_request(engine, make_runtime, tokenizer):
    runtime = make_runtime([engine.url], rollout_max_response_len=3)
    sample = run_generate(runtime, partial_sample(tokenizer))
    assert (sample.status, sample.response, engine.requests) == (Sample.Status.TRUNCATED, "cde", [])


def test_request_aborted_by_the_engine_is_resumed(engine, make_runtime, tokenizer):
    answers = [{"text": "ab", "finish": "abort"}, {"text": "", "finish": "abort"}, "c</s>"]
    engine.respond = lambda body: answers.pop(0)
    runtime = make_runtime([engine.url])
    sample = run_generate(runtime, Sample(prompt="x"))
    assert (sample.response, sample.response_length, sample.status) == ("abc", 4, Sample.Status.COMPLETED)
    assert [tokenizer.decode(request["input_ids"]) for request in engine.requests] == ["x", "xab", "xab"]


def test_rollout_abort_returns_the_partial_sample(engine, make_runtime):
    runtime = make_runtime([engine.url])

    def abort(body):
        runtime.state.aborted = True
        return {"text": "ab", "finish": "abort"}

    engine.respond = abort
    sample = run_generate(runtime, Sample(prompt="x"))
    assert (sample.status, sample.response, len(engine.requests)) == (Sample.Status.ABORTED, "ab", 1)


def test_aborts_with_progress_are_not_limited(engine, make_runtime):
    engine.respond = lambda body: {"text": "a", "finish": "abort" if len(engine.requests) < 20 else "stop"}
    sample = run_generate(make_runtime([engine.url], rollout_max_response_len=64), Sample(prompt="x"))
    assert (sample.response, len(engine.requests)) == ("a" * 20, 20)


def test_repeated_aborts_without_progress_raise(engine, make_runtime):
    engine.respond = lambda body: {"text": "", "finish": "abort"}
    with pytest.raises(AbortedTooOften):
        run_generate(make_runtime([engine.url]), Sample(prompt="x"))


def test_transient_errors_are_retried_and_then_raised(engine, make_runtime):
    answers = [web.Response(status=503, text="busy"), web.Response(status=500, text="oops"), "ok</s>"]
    engine.respond = lambda body: answers.pop(0)
    runtime = make_runtime([engine.url])
    assert run_generate(runtime, Sample(prompt="x")).response == "ok"
    dead = make_runtime(["http://127.0.0.1:9"])
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9"):
        run_generate(dead, Sample(prompt="x"))


def test_rejected_request_is_not_retried(engine, make_runtime):
    engine.respond = lambda body: web.json_response({"error": {"message": "too long"}}, status=400)
    with pytest.raises(EngineRejected, match="too long"):
        run_generate(make_runtime([engine.url]), Sample(prompt="x"))
    assert len(engine.requests) == 1


def test_failing_request_is_tried_four_times(engine, make_runtime):
    engine.respond = lambda body: web.Response(status=500, text="out of memory")
    with pytest.raises(EngineFailed, match="status 500: out of memory"):
        run_generate(make_runtime([engine.url]), Sample(prompt="x"))
    assert len(engine.requests) == 4


@pytest.mark.parametrize(
    ("said", "flags", "text"),
    [
        ("7</s>", {}, "7"),
        ("<user>7</s>", {}, "<user>7"),  # special tokens before the end may matter to the reward
        ("7</s></s>", {}, "7</s>"),
        ("7!", {}, "7!"),
        ("7</s>", {"rollout_skip_special_tokens": False}, "7</s>"),
        ("0123456</s>9", {}, "0123456</s>9"),  # truncated at max_new_tokens
    ],
)
def test_stop_token_is_removed_from_the_text_but_trained(engine, make_runtime, tokenizer, said, flags, text):
    engine.respond = lambda body: said
    sample = run_generate(make_runtime([engine.url], **flags), Sample(prompt="x"))
    assert sample.response == text
    assert sample.tokens == tokenizer.encode("x" + said)[:9]
    assert sample.loss_mask == [1] * sample.response_length


@pytest.mark.parametrize(("is_wanted", "text"), [(False, "7"), (True, "7!")])
def test_stop_token_stays_in_the_text_only_if_the_user_configured_it(engine, make_runtime, tokenizer, is_wanted, text):
    [end] = tokenizer.encode("!")
    wanted = {"rollout_stop_token_ids": [end]} if is_wanted else {}

    def stopped(body):
        ids = tokenizer.encode("7!")
        return web.json_response(
            {
                "text": "7!",
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": "stop", "matched": end},
                    "prompt_tokens": 1,
                    "completion_tokens": 2,
                    "cached_tokens": 0,
                    "weight_version": "1",
                    "output_token_logprobs": [[-1.0, token, None] for token in ids],
                },
            }
        )

    engine.respond = stopped
    sample = run_generate(make_runtime([engine.url], **wanted), Sample(prompt="x"))
    assert (sample.response, sample.response_length) == (text, 2)


def test_group_tokenizes_its_prompt_once(engine, make_runtime, monkeypatch):
    runtime = make_runtime([engine.url], n_samples_per_prompt=4, rm_type="random")
    encoded = []
    encode = type(runtime.tokenizer).encode
    monkeypatch.setattr(
        type(runtime.tokenizer), "encode", lambda self, text, **kw: encoded.append(text) or encode(self, text, **kw)
    )
    for prompt in ("2+3=", "4+4="):
        group = [Sample(prompt=prompt, index=i, group_index=0) for i in range(4)]
        made = runtime.run(generate_and_rm_group(runtime, group, {"max_new_tokens": 8}))
        ids = encode(runtime.tokenizer, prompt, add_special_tokens=False)
        assert [sample.tokens[: len(ids)] for sample in made] == [ids] * 4
        assert len({id(sample.tokens) for sample in made}) == 4
    assert [text for text in encoded if text.endswith("=")] == ["2+3=", "4+4="]  # the engine encodes answers too
