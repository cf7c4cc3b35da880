"""Joining the parts of an aborted response, and building the request for its remaining tokens."""

import base64

import numpy as np
import pytest

from slime.data.sample import Sample
from slime.engine.http.protocol import (
    GenerateResult,
    continued_params,
    continued_payload,
    extract_token_ids,
    is_single_request,
    join_responses,
    sampling_seed,
    was_aborted,
)
from slime.utils.http_utils import post


def part(ids, finish, version, **meta):
    return {
        "text": "".join(map(chr, ids)),
        "output_ids": ids,
        "meta_info": {
            "id": f"id-{version}",
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-i / 100, i, None] for i in ids],
            "completion_tokens": len(ids),
            "weight_version": version,
            **meta,
        },
    }


def pack(numbers):
    return base64.b64encode(np.asarray(numbers, dtype=np.int32).tobytes()).decode()


def test_joined_answers_merge_tokens_log_probs_and_versions():
    first = part(
        [65, 66, 67], "abort", "2", prompt_tokens=10, cached_tokens=8, e2e_latency=1.0, spec_verify_ct=2,
        weight_versions=[{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
        top_p_token_ids=pack([1, 2, 3]), top_p_token_offsets=pack([0, 1, 1, 3]), input_token_logprobs=[[None, 5]],
    )  # fmt: skip
    rest = part(
        [68, 69], "stop", "3", prompt_tokens=13, cached_tokens=12, e2e_latency=0.5, spec_verify_ct=1,
        weight_versions=[{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}],
        top_p_token_ids=[7, 8], top_p_token_offsets=[0, 2, 2],
    )  # fmt: skip
    one = join_responses(first, rest)
    meta = one["meta_info"]
    assert (one["text"], one["output_ids"]) == ("ABCDE", [65, 66, 67, 68, 69])
    assert [token for _, token, _ in meta["output_token_logprobs"]] == one["output_ids"]
    assert [log_prob for log_prob, _, _ in meta["output_token_logprobs"]] == [-i / 100 for i in one["output_ids"]]
    assert (meta["finish_reason"], meta["weight_version"], meta["id"]) == ({"type": "stop"}, "3", "id-2")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (10, 5, 10)
    assert (meta["e2e_latency"], meta["spec_verify_ct"], meta["input_token_logprobs"]) == (1.5, 3, [[None, 5]])
    assert meta["weight_versions"] == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 4},
        {"version": "3", "start": 4, "end": 5},
    ]
    assert (meta["top_p_token_ids"], meta["top_p_token_offsets"]) == ([1, 2, 3, 7, 8], [0, 1, 1, 3, 5, 5])
    sample = Sample(tokens=[1])
    log_probs, tokens, _ = zip(*meta["output_token_logprobs"], strict=True)
    sample.append_response_tokens(tokens=tokens, log_probs=log_probs, meta_info=meta, text=one["text"])
    assert sample.version_spans == [["1", 2], ["2", 2], ["3", 1]]
    assert sample.rollout_top_p_token_offsets == [0, 1, 1, 3, 5, 5]


def test_joined_answers_accept_parts_without_tokens_or_versions():
    waiting = part([], "abort", "1")
    del waiting["meta_info"]["output_token_logprobs"]
    one = join_responses(waiting, part([65], "length", "2"))
    assert one["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 1}]
    assert (one["text"], one["output_ids"]) == ("A", [65])
    nameless = join_responses(part([65], "abort", None), part([66], "stop", None))
    assert nameless["meta_info"]["weight_versions"] == []


def test_results_with_columns_join_over_three_requests():
    def columns(ids):
        log_probs = np.asarray([-i / 128 for i in ids], dtype=np.float32)
        return {"ids": pack(ids), "logprobs": base64.b64encode(log_probs.tobytes()).decode()}

    def result(ids, finish, version):
        answer = part(ids, finish, version, prompt_tokens=10, output_token_logprobs=columns(ids))
        return GenerateResult.from_json({**answer, "output_ids": None}, url="http://engine")

    parts = [result([65, 66], "abort", "1"), result([67], "abort", "2"), result([68, 69], "stop", "3")]
    one = GenerateResult.joined(parts, "ABCDE")
    assert (one.text, one.token_ids, one.finish_type) == ("ABCDE", [65, 66, 67, 68, 69], "stop")
    assert one.log_probs == [-i / 128 for i in one.token_ids]
    assert (one.meta_info["prompt_tokens"], one.meta_info["completion_tokens"]) == (10, 5)
    assert "output_token_logprobs" not in one.meta_info
    assert one.meta_info["weight_versions"] == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 3},
        {"version": "3", "start": 3, "end": 5},
    ]


def test_continued_payload_requests_the_remaining_tokens():
    payload = {
        "text": "hi",
        "rid": "r",
        "logprob_start_len": 0,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 8, "min_new_tokens": 7, "sampling_seed": 3, "top_p": 0.9},
    }
    assert continued_payload(payload, [1, 2], [9, 9, 9]) == {
        "input_ids": [1, 2, 9, 9, 9],
        "rid": "r",
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 5,
            "min_new_tokens": 4,
            "sampling_seed": sampling_seed(3, 3),
            "top_p": 0.9,
        },
    }
    assert continued_params({"sampling_seed": 3}, 0) == {"max_new_tokens": 128, "sampling_seed": 3}
    assert continued_params({"max_new_tokens": 2, "min_new_tokens": 1}, 5) == {"max_new_tokens": 0, "min_new_tokens": 0}


@pytest.mark.parametrize(
    ("payload", "single"),
    [
        ({"input_ids": [1]}, True),
        ({"text": "x", "sampling_params": {"n": 1}}, True),
        ({"text": ["x", "y"]}, False),
        ({"input_ids": [[1], [2]]}, False),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, False),
        ({"input_ids": [1], "stream": True}, False),
        ("x", False),
    ],
)
def test_only_single_non_streaming_requests_can_be_continued(payload, single):
    assert is_single_request(payload) is single


def test_answered_ids_and_was_aborted_read_an_answer():
    assert was_aborted(part([1], "abort", "1"))
    assert not was_aborted(part([1], "stop", "1"))
    assert not was_aborted("data: [DONE]")
    assert not was_aborted({"text": "x"})
    bare = {"output_ids": [4], "meta_info": {"completion_tokens": 1}}
    assert extract_token_ids(bare) == [4]
    assert extract_token_ids({"meta_info": {"completion_tokens": 1}}) is None


def test_text_prompt_is_continued_from_its_tokens(engine, make_runtime, tokenizer):
    answers = [{"text": "ab", "finish": "abort"}, "c</s>"]
    engine.respond = lambda body: answers.pop(0)
    runtime = make_runtime([engine.url])
    body = {"text": "x", "input_ids": None, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
    engine_sees = [tokenizer.encode("x"), tokenizer.encode("xab")]

    def respond(body):
        body["input_ids"] = body.get("input_ids") or tokenizer.encode(body["text"])
        return answers.pop(0)

    engine.respond = respond
    answer = runtime.run(post(f"{engine.url}/generate", body), 120)
    assert [request["input_ids"] for request in engine.requests] == engine_sees
    assert (answer["text"], answer["meta_info"]["completion_tokens"]) == ("abc</s>", 4)


def test_request_with_its_own_rid_or_to_another_engine_is_not_continued(engine, make_engine, make_runtime):
    runtime, other = make_runtime([engine.url]), make_engine()
    for one in (engine, other):
        one.respond = lambda body: {"text": "ab", "finish": "abort"}
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 8}}
    for target, own in ((engine, {"rid": "mine"}), (other, {})):
        answer = runtime.run(post(f"{target.url}/generate", {**body, **own}), 120)
        assert (answer["text"], len(target.requests)) == ("ab", 1)


def test_abort_inside_a_multibyte_character_keeps_the_text_intact(engine, make_runtime, tokenizer):
    answers = [{"text": "ab", "finish": "abort"}, "c</s>"]
    runtime = make_runtime([engine.url])

    def respond(body):
        said = answers.pop(0)
        if isinstance(said, dict):
            from aiohttp import web

            ids = tokenizer.encode("ab")
            meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-1.0, i, None] for i in ids]}
            return web.json_response({"text": "a\N{REPLACEMENT CHARACTER}", "output_ids": ids, "meta_info": meta})
        return said

    engine.respond = respond
    params = {"max_new_tokens": 8, "skip_special_tokens": False}
    answer = runtime.run(post(f"{engine.url}/generate", {"input_ids": [5], "sampling_params": params}), 120)
    assert answer["text"] == "abc</s>"
