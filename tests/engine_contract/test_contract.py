"""The engine contract: behaviour that rollout relies on with every kind of engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.engine.http.client import Growing
from slime.engine.http.errors import EngineRejected
from slime.engine.http.protocol import GenerateResult, generate_payload
from tests.engine_contract.engines import Engine, after_first_tokens

PROMPT = [284, 264, 286, 13, 267, 33]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
LONG: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 1600, "ignore_eos": True}
TRIES = 4
"""Attempts to act during a request, which may finish first."""


@pytest.fixture(scope="module")
def references(first_model: Path, second_model: Path) -> dict[str, Any]:
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in (("first", first_model), ("second", second_model))
    }


def log_probs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def test_generate_returns_token_ids_and_log_probs(engine: Engine) -> None:
    answer = engine.generate(PROMPT, **GREEDY)
    result = GenerateResult.from_json(answer, url=engine.url)
    assert len(result.token_ids) == len(result.log_probs) == 16
    assert answer["output_ids"] == result.token_ids
    assert (result.finish_type, result.meta_info["prompt_tokens"], result.meta_info["completion_tokens"]) == (
        "length",
        6,
        16,
    )
    assert result.meta_info["weight_version"] == "first"


def test_client_result_has_the_tokens_of_the_raw_answer(engine: Engine) -> None:
    result = engine.call(lambda client: client.generate_result(generate_payload(PROMPT, GREEDY)))
    assert result.token_ids == engine.generate(PROMPT, **GREEDY)["output_ids"]


def test_client_result_equals_the_plain_answer(engine: Engine) -> None:
    """The client asks for columns; an engine without support for them gives the plain answer."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    plain = GenerateResult.from_json(engine.generate(PROMPT, **params), url=engine.url)
    result = engine.call(lambda client: client.generate_result(generate_payload(PROMPT, params)))
    assert len(result.token_ids) == 300
    assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
    assert (result.id_array.dtype, result.log_prob_array.dtype) == (plain.id_array.dtype, plain.log_prob_array.dtype)
    assert abs(result.log_prob_array - plain.log_prob_array).max() <= 1e-4  # computed in another batch
    assert (result.finish_type, result.meta_info["completion_tokens"], result.meta_info["weight_version"]) == (
        "length",
        300,
        "first",
    )


def test_greedy_tokens_match_transformers(engine: Engine, references: dict[str, Any]) -> None:
    expected = greedy(references["first"], PROMPT, 16)
    assert [engine.generate(PROMPT, **GREEDY)["output_ids"] for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_match_transformers(engine: Engine, references: dict[str, Any], temperature: float) -> None:
    for seed in range(4):
        answer = engine.generate([*PROMPT, seed], temperature=temperature, max_new_tokens=48, ignore_eos=True)
        result = GenerateResult.from_json(answer, url=engine.url)
        expected = log_probs(references["first"], [*PROMPT, seed], result.token_ids, temperature)
        assert (torch.tensor(result.log_probs) - expected).abs().max() <= 1e-4


def test_answers_several_samples_and_several_prompts(engine: Engine) -> None:
    answers = engine.generate(PROMPT, n=3, temperature=1.0, max_new_tokens=8, ignore_eos=True)
    assert [len(answer["output_ids"]) for answer in answers] == [8, 8, 8]
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    body = {"input_ids": [PROMPT, [5, 6]], "sampling_params": [GREEDY, {**GREEDY, "max_new_tokens": 3}]}
    status, answers = engine.post("/generate", body)
    assert status == 200
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [16, 3]


def test_stop_token_ends_the_answer_and_is_included(engine: Engine) -> None:
    free = engine.generate(PROMPT, **GREEDY)["output_ids"]
    stop = free[5]
    cut = engine.generate(PROMPT, temperature=0, max_new_tokens=16, stop_token_ids=[stop])
    assert cut["output_ids"] == free[: free.index(stop) + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(cut["meta_info"]["output_token_logprobs"]) == len(cut["output_ids"])


def test_eos_token_stops_unless_ignored(engine: Engine) -> None:
    bias = {"2": 100.0}
    ended = engine.generate(PROMPT, temperature=0, max_new_tokens=4, logit_bias=bias)
    assert (ended["output_ids"], ended["meta_info"]["finish_reason"]["type"]) == ([2], "stop")
    ignored = engine.generate(PROMPT, temperature=0, max_new_tokens=4, logit_bias=bias, ignore_eos=True)
    assert ignored["output_ids"] == [2, 2, 2, 2]


def test_no_stop_trim_keeps_the_stop_string(engine: Engine) -> None:
    word = "what"  # token 284
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "logit_bias": {"284": 1000.0}}
    stopped = engine.generate([9], **params, stop=[word * 2], no_stop_trim=True)
    assert stopped["output_ids"] == [284, 284]
    assert stopped["text"] == word * 2
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": word * 2}


def test_shared_prefix_is_cached_until_a_flush(engine: Engine) -> None:
    prompt = list(range(40, 104))
    params = {"temperature": 0, "max_new_tokens": 2}
    engine.call(lambda client: client.flush_cache())
    assert engine.generate(prompt, **params)["meta_info"]["cached_tokens"] == 0
    assert engine.generate([*prompt, 7], **params)["meta_info"]["cached_tokens"] >= 60
    engine.call(lambda client: client.flush_cache())
    assert engine.generate(prompt, **params)["meta_info"]["cached_tokens"] == 0


def test_health_checks_succeed(engine: Engine) -> None:
    assert engine.call(lambda client: client.health()) is True
    assert engine.call(lambda client: client.health_generate()) is True


def test_abort_by_rid_returns_the_partial_tokens(engine: Engine) -> None:
    for _ in range(TRIES):
        asked = engine.in_background(lambda: engine.generate(PROMPT, rid="slow", **LONG))
        other = engine.in_background(lambda: engine.generate(PROMPT, rid="other", **{**LONG, "max_new_tokens": 200}))
        after_first_tokens(engine, asked, other)
        engine.call(lambda client: client.abort("slow"))
        result = GenerateResult.from_json(asked.result(240), url=engine.url)
        assert other.result(240)["meta_info"]["completion_tokens"] == 200
        if result.finish_type == "abort":
            break
    assert result.finish_type == "abort"
    assert 0 < len(result.token_ids) == len(result.log_probs) < 1600


def test_abort_all_aborts_every_request(engine: Engine) -> None:
    for _ in range(TRIES):
        asked = [engine.in_background(lambda: engine.generate(PROMPT, **LONG)) for _ in range(3)]
        after_first_tokens(engine, *asked)
        engine.call(lambda client: client.abort(abort_all=True))
        results = [GenerateResult.from_json(one.result(240), url=engine.url) for one in asked]
        if all(result.finish_type == "abort" for result in results):
            break
    for result in results:
        assert result.finish_type == "abort"
        assert len(result.token_ids) == len(result.log_probs) < 1600


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_pause_modes_around_a_weight_update(
    engine: Engine, first_model: Path, second_model: Path, references: dict[str, Any], mode: Any
) -> None:
    fresh = [20, 21, 22]  # not in the prefix cache: an update without a flush leaves prefixes of the old weights there
    for _ in range(TRIES):
        engine.load(first_model, "first")
        asked = engine.in_background(lambda: engine.generate(PROMPT, **LONG))
        after_first_tokens(engine, asked)
        engine.call(lambda client: client.pause(mode))
        engine.load(second_model, "second", flush_cache=mode == "abort")
        later = engine.in_background(lambda: engine.generate(fresh, **GREEDY))
        time.sleep(0.3)
        assert not later.done()
        engine.call(lambda client: client.continue_())
        assert later.result(240)["output_ids"] == greedy(references["second"], fresh, 16)
        assert later.result(240)["meta_info"]["weight_version"] == "second"
        meta = asked.result(240)["meta_info"]
        if meta["finish_reason"]["type"] == "abort" or meta["weight_version"] == "second":
            break
    if mode == "abort":
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["weight_version"] == "first"
        return
    assert meta["completion_tokens"] == 1600
    spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    cut = spans[0][2]
    assert 0 < cut < 1600
    assert spans == [("first", 0, cut), ("second", cut, 1600)]


def test_update_from_disk_changes_tokens_and_version(
    engine: Engine, second_model: Path, references: dict[str, Any]
) -> None:
    assert engine.generate(PROMPT, **GREEDY)["output_ids"] == greedy(references["first"], PROMPT, 16)
    engine.load(second_model, "7")
    answer = engine.generate(PROMPT, **GREEDY)
    assert answer["output_ids"] == greedy(references["second"], PROMPT, 16)
    assert answer["meta_info"]["weight_version"] == engine.version() == "7"
    assert answer["meta_info"]["cached_tokens"] == 0


def test_rejects_an_update_from_a_missing_folder(engine: Engine, tmp_path: Path) -> None:
    before = engine.generate(PROMPT, **GREEDY)["output_ids"]
    with pytest.raises(EngineRejected):
        engine.call(lambda client: client.update_weights_from_disk(tmp_path / "nothing", "bad"))
    assert engine.generate(PROMPT, **GREEDY)["output_ids"] == before


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{not json", id="not JSON"),
        pytest.param({}, id="no prompt"),
        pytest.param({"input_ids": []}, id="empty prompt"),
        pytest.param({"input_ids": [5] * 3000, "sampling_params": {"max_new_tokens": 4}}, id="too long"),
        pytest.param({"input_ids": [5], "sampling_params": {"temperature": -1}}, id="negative temperature"),
        pytest.param({"input_ids": [5], "sampling_params": {"top_p": 7}}, id="impossible top_p"),
        pytest.param({"input_ids": [5], "sampling_params": {"nonsense": 1}}, id="unknown parameter"),
    ],
)
def test_rejects_malformed_requests_and_keeps_serving(engine: Engine, body: Any) -> None:
    status, answer = engine.post("/generate", body)
    assert status >= 400, answer
    assert engine.generate([5], **GREEDY)["meta_info"]["completion_tokens"] == 16


def test_prompt_log_probs_match_transformers(engine: Engine, references: dict[str, Any]) -> None:
    tokens = [*PROMPT, 40, 41, 42, 43]
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
    status, answer = engine.post("/generate", {**body, "logprob_start_len": 0})
    assert status == 200, answer
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == tokens
    assert scored[0][0] is None
    expected = log_probs(references["first"], tokens[:1], tokens[1:])
    assert (torch.tensor([entry[0] for entry in scored[1:]]) - expected).abs().max() <= 1e-4


def test_streamed_tokens_equal_the_whole_answer(engine: Engine) -> None:
    grown = Growing()
    payload = generate_payload(PROMPT, GREEDY)
    engine.call(lambda client: client.stream_generate(grown, payload))
    result = GenerateResult.from_json(grown.latest, url=engine.url)
    assert result.token_ids == engine.generate(PROMPT, **GREEDY)["output_ids"]
    assert len(result.log_probs) == 16
