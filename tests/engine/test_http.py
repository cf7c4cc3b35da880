"""The HTTP interface of the engine process."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.server import EngineServer
from slime.engine.embedded.options import parse_options
from slime.engine.fleet.status import request_load
from tests.engine.conftest import EngineProcess
from tests.tiny_models import make_model_folder

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}
TRIES = 5
JSON = {"Content-Type": "application/json"}
"""`TRIES`: attempts to act during a request, which may finish first."""


def test_server_refuses_requests_while_the_model_is_loading() -> None:
    """Only /server_info is answered, with the status of the engine."""
    core = EngineCore(parse_options(["--model-path", "m", "--api-key", "k"]), on_death=print)

    async def ask() -> list[tuple[int, Any]]:
        async with TestClient(TestServer(EngineServer(EngineBridge(core)).app)) as client:
            key = {"Authorization": "Bearer k"}
            asked = [("GET", "/server_info"), ("GET", "/get_server_info"), ("GET", "/health"), ("POST", "/generate")]
            answers = [await client.request(*one, json={"input_ids": [5]}, headers=key) for one in asked]
            return [(answer.status, await answer.json()) for answer in answers]

    (info_status, info), (other_status, other), health, generate = asyncio.run(ask())
    assert (info_status, info["status"], other_status, other["status"]) == (200, "loading", 200, "loading")
    assert [status for status, _ in (health, generate)] == [503, 503]
    assert "still loading" in generate[1]["error"]["message"]


def test_text_and_token_id_prompts_give_the_same_answer(engine: EngineProcess) -> None:
    params = {"max_new_tokens": 6, "temperature": 0}
    by_text = engine.generate(text="what is 12+34?", sampling_params=params)
    ids = engine.generate(input_ids=[284, 264, 286, 13, 267, 33], sampling_params=params)
    assert by_text["output_ids"] == ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == 6
    assert by_text["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_batches_and_n_return_one_answer_per_sample(engine: EngineProcess) -> None:
    body = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}]}
    answers = engine.generate(**body)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [2, 3]
    assert len(engine.generate(input_ids=[5], sampling_params={"n": 3, "max_new_tokens": 1})) == 3


def test_stop_ids_and_strings_end_the_response_and_are_trimmed(engine: EngineProcess) -> None:
    free = engine.generate(
        input_ids=[9, 10], sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    )
    stop_id = free["output_ids"][4]
    first = free["output_ids"].index(stop_id)
    params: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "stop_token_ids": [stop_id]}
    cut = engine.generate(input_ids=[9, 10], sampling_params=params)
    assert cut["output_ids"] == free["output_ids"][: first + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    biased = {"max_new_tokens": 12, "temperature": 0, "logit_bias": {"284": 1000.0}}
    word = "what"  # token 284
    assert engine.generate(input_ids=[9], sampling_params=biased)["text"] == word * 12
    params = {**biased, "stop": [word * 2]}
    stopped = engine.generate(input_ids=[9], sampling_params=params)
    assert stopped["meta_info"]["completion_tokens"] == 2
    assert stopped["text"] == ""
    assert stopped["meta_info"]["finish_reason"]["matched"] == word * 2
    assert engine.generate(input_ids=[9], sampling_params={**params, "no_stop_trim": True})["text"] == word * 2


def test_stream_ends_with_the_unstreamed_answer(engine: EngineProcess) -> None:
    body = {
        "input_ids": [11, 12, 13],
        "sampling_params": {"max_new_tokens": 7, "temperature": 0},
        "return_logprob": True,
    }
    whole = engine.generate(**body)
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=240)
    connection.request("POST", "/generate", json.dumps({**body, "stream": True}), JSON)
    events = connection.getresponse().read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-1]]
    assert [c["output_ids"] for c in chunks] == [whole["output_ids"][: len(c["output_ids"])] for c in chunks]
    assert (chunks[-1]["output_ids"], chunks[-1]["text"]) == (whole["output_ids"], whole["text"])
    entries, told = chunks[-1]["meta_info"]["output_token_logprobs"], whole["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == [entry[1] for entry in told]
    assert [entry[0] for entry in entries] == pytest.approx([entry[0] for entry in told], abs=1e-5)
    for chunk in chunks:
        assert whole["text"].startswith(chunk["text"])
        assert chunk["meta_info"]["completion_tokens"] == len(chunk["output_ids"])
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])


def test_stream_interval_sets_the_tokens_per_event(engine: EngineProcess) -> None:
    body = {"input_ids": [11], "sampling_params": {"max_new_tokens": 7, "ignore_eos": True, "stream_interval": 4}}
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=240)
    connection.request("POST", "/generate", json.dumps({**body, "stream": True}), JSON)
    events = connection.getresponse().read().decode().strip().split("\n\n")[:-1]
    assert [len(json.loads(event.removeprefix("data: "))["output_ids"]) for event in events] == [4, 7]


def test_abort_returns_the_partial_tokens(engine: EngineProcess) -> None:
    for _ in range(TRIES):
        asked = engine.in_background(
            lambda: engine.generate(input_ids=[5], rid="slow", sampling_params=LONG, return_logprob=True)
        )
        engine.wait_running(1, asked.done)
        aborted = engine.post("/abort_request", {"rid": "slow"})[1]["aborted"]
        answer = asked.result(240)
        if aborted:
            break
    assert aborted == 1
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < 400


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_pause_modes_around_a_weight_update(engine: EngineProcess, qwen3_folder: Path, mode: str) -> None:
    for _ in range(TRIES):
        engine.post("/update_weights_from_disk", {"model_path": str(qwen3_folder), "weight_version": "old"})
        asked = engine.in_background(lambda: engine.generate(input_ids=[5, 6], sampling_params=LONG))
        engine.wait_running(1, asked.done)
        assert engine.post("/pause_generation", {"mode": mode})[0] == 200
        new = {"model_path": str(qwen3_folder), "weight_version": "new", "flush_cache": False}
        status, reply = engine.post("/update_weights_from_disk", new)
        assert (status, reply["weight_version"]) == (200, "new")
        later = engine.in_background(lambda: engine.generate(input_ids=[7], sampling_params={"max_new_tokens": 2}))
        time.sleep(0.2)
        assert not later.done()
        assert engine.post("/continue_generation", {})[0] == 200
        assert later.result(240)["meta_info"]["weight_version"] == "new"
        meta = asked.result(240)["meta_info"]
        if meta["finish_reason"]["type"] == "abort" or meta["weight_version"] == "new":
            break
    if mode == "abort":
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["weight_version"] == "old"
    else:
        assert meta["completion_tokens"] == 400
        spans = meta["weight_versions"]
        assert [s["version"] for s in spans] == ["old", "new"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 400)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_no_prefix_of_old_weights_is_reused(
    engine: EngineProcess, qwen3_folder: Path, tmp_path: Path, mode: str
) -> None:
    other = make_model_folder(tmp_path / "other", seed=1)
    probe: dict[str, Any] = {
        "input_ids": [30, 31, 32, 33, 34, 35],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        "return_logprob": True,
    }
    engine.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "other"})
    expected = engine.generate(**probe)["meta_info"]["output_token_logprobs"]
    engine.post("/update_weights_from_disk", {"model_path": str(qwen3_folder), "weight_version": "old"})
    engine.generate(**probe)
    asked = engine.in_background(lambda: engine.generate(input_ids=[30, 31, 32, 5], sampling_params=LONG))
    engine.wait_running(1, asked.done)
    engine.post("/pause_generation", {"mode": mode})
    engine.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "new", "flush_cache": False})
    engine.post("/continue_generation", {})
    meta = engine.generate(**probe)["meta_info"]
    asked.result(240)
    engine.post("/update_weights_from_disk", {"model_path": str(qwen3_folder), "weight_version": "old"})
    if mode == "in_place":
        assert meta["cached_tokens"] == 0
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [token for _, token, _ in expected]
    assert [lp for lp, _, _ in meta["output_token_logprobs"]] == pytest.approx([lp for lp, _, _ in expected], abs=1e-4)


def test_weights_load_from_disk_files_and_bytes(engine: EngineProcess, qwen3_folder: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", seed=1)
    probe: dict[str, Any] = {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    engine.post("/update_weights_from_disk", {"model_path": str(qwen3_folder), "weight_version": "a"})
    before = engine.generate(**probe)["output_ids"]
    assert engine.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "b"})[0] == 200
    after = engine.generate(**probe)
    assert after["output_ids"] != before
    assert after["meta_info"]["weight_version"] == "b"
    assert after["meta_info"]["cached_tokens"] == 0
    files = {
        "load_format": "safetensors_file",
        "paths": [str(qwen3_folder / "model.safetensors")],
        "weight_version": "c",
    }
    assert engine.post("/update_weights_from_tensor", files)[0] == 200
    assert engine.generate(**probe)["output_ids"] == before
    blob = safetensors.torch.save(load_file(other / "model.safetensors"))
    path = "/update_weights_from_tensor?weight_version=d"
    assert engine.post(path, blob, "application/octet-stream")[0] == 200
    assert engine.generate(**probe)["output_ids"] == after["output_ids"]
    assert engine.get("/get_weight_version")[1] == {"weight_version": "d"}


def test_rejected_update_changes_nothing(engine: EngineProcess, qwen3_folder: Path, tmp_path: Path) -> None:
    engine.post("/update_weights_from_disk", {"model_path": str(qwen3_folder), "weight_version": "good"})
    probe: dict[str, Any] = {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    before = engine.generate(**probe)["output_ids"]
    tensors = load_file(qwen3_folder / "model.safetensors")
    wrong = {name: torch.zeros_like(t) for name, t in tensors.items()} | {"lm_head.weight": torch.zeros(3, 3)}
    status, reply = engine.post(
        "/update_weights_from_tensor?weight_version=bad", safetensors.torch.save(wrong), "application/octet-stream"
    )
    assert status == 400
    assert "lm_head.weight has shape (3, 3)" in reply["error"]["message"]
    pickles = {"serialized_named_tensors": ["gASV"], "weight_version": "bad"}
    assert "pickles" in engine.post("/update_weights_from_tensor", pickles)[1]["error"]["message"]
    assert engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)})[0] == 400
    assert engine.generate(**probe)["output_ids"] == before
    assert engine.get("/get_weight_version")[1]["weight_version"] == "good"


def test_memory_is_released_and_resumed(engine: EngineProcess) -> None:
    probe: dict[str, Any] = {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    before = engine.generate(**probe)["output_ids"]
    assert engine.post("/release_memory_occupation", {})[0] == 200
    assert engine.get("/server_info")[1]["released"] == ["kv_cache", "weights"]
    waiting = engine.in_background(lambda: engine.generate(**probe))
    assert engine.post("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    assert engine.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})[0] == 200
    assert waiting.result(240)["output_ids"] == before


def test_discarded_weights_give_503_until_an_update(engine: EngineProcess, qwen3_folder: Path) -> None:
    probe: dict[str, Any] = {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    before = engine.generate(**probe)["output_ids"]
    assert engine.post("/release_memory_occupation", {"discard_weights": 1})[0] == 400
    assert engine.post("/release_memory_occupation", {"discard_weights": True})[0] == 200
    assert engine.post("/resume_memory_occupation", {})[0] == 200
    status, answer = engine.post("/generate", probe)
    assert (status, "released without a copy" in answer["error"]["message"]) == (503, True)
    body = {"model_path": str(qwen3_folder), "weight_version": "whole"}
    assert engine.post("/update_weights_from_disk", body)[0] == 200
    assert engine.generate(**probe)["output_ids"] == before
    assert engine.post("/release_memory_occupation", {})[0] == 200
    assert engine.post("/resume_memory_occupation", {})[0] == 200
    assert engine.generate(**probe)["output_ids"] == before


HANDLE = base64.b64encode(bytes(64)).decode()


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({}, 409, "computes on cpu"),
        ({"handle": None}, 400, "handle is missing"),
        ({"handle": 7}, 400, "handle must be a string"),
        ({"handle": "no base64!"}, 400, "handle must be base64"),
        ({"handle": HANDLE[:-8]}, 400, "handle must have 64 bytes"),
        ({"offset": -1}, 400, "offset must be between"),
        ({"region": "/nowhere/at/all"}, 409, "cannot open the shared memory '/nowhere/at/all'"),
        ({"pause_mode": "later"}, 400, "pause_mode must be one of"),
        ({"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[3]]}, 400, "has shape (3,)"),
        ({"names": ["nothing.weight"], "dtypes": ["float32"], "shapes": [[3]]}, 400, "does not have"),
        ({"names": ["model.norm.weight"], "dtypes": ["pickle"], "shapes": [[3]]}, 400, "dtype 'pickle'"),
        ({"bucket": [2, 1]}, 400, "bucket must be"),
    ],
)
def test_invalid_handle_is_rejected_and_changes_nothing(
    engine: EngineProcess, changes: dict[str, Any], status: int, says: str
) -> None:
    version = engine.get("/get_weight_version")[1]["weight_version"]
    body = {"handle": HANDLE, "names": [], "dtypes": [], "shapes": [], "weight_version": "9"} | changes
    found, answer = engine.post("/update_weights_from_handle", body)
    assert (found, says in answer["error"]["message"]) == (status, True), answer
    assert engine.get("/get_weight_version")[1]["weight_version"] == version


def test_openai_routes_answer_chat_and_completions(engine: EngineProcess) -> None:
    assert engine.get("/v1/models")[1]["data"][0]["max_model_len"] == 512
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    status, answer = engine.post("/v1/chat/completions", chat)
    assert status == 200
    assert len(answer["choices"]) == 2
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert answer["usage"]["completion_tokens"] <= 8
    assert engine.post("/v1/chat/completions", {"messages": []})[0] == 400
    in_parts = {**chat, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 1}
    assert (
        engine.post("/v1/chat/completions", in_parts)[1]["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    )
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    status, answer = engine.post("/v1/chat/completions", image)
    assert status == 400
    assert "messages: message 0: has a part of type 'image_url'" in json.dumps(answer)
    assert (
        engine.post("/v1/completions", {"prompt": "what is", "max_tokens": 3})[1]["choices"][0]["finish_reason"]
        == "length"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"[1]", "must be a JSON object"),
        ({}, "exactly one of text and input_ids"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [1, 99999]}, "token id 99999 is outside the vocabulary of 320"),
        ({"input_ids": [1, "a"]}, "integers only"),
        ({"input_ids": [1] * 600}, "the prompt has 600 tokens, the context holds 512"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be between"),
        ({"input_ids": [1], "sampling_params": {"temperature": 1e39}}, "temperature must be between"),
        ({"input_ids": [1], "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty must be between"),
        ({"input_ids": [1], "sampling_params": {"top_p": "x"}}, "top_p must be a number"),
        ({"input_ids": [1], "sampling_params": {"nonsense": 1}}, "unknown sampling parameter 'nonsense'"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "'regex', which may change what is sampled"),
        ({"input_ids": [1], "nonsense": 1}, "unknown field 'nonsense'"),
        ({"input_ids": [1], "session_params": {"id": "x"}}, "session_params is not supported"),
        ({"input_ids": [1], "return_routed_experts": True}, "this model has no routed experts"),
        ({"input_ids": [1], "routed_experts_start_len": -1}, "routed_experts_start_len must be between"),
        ({"input_ids": [[1], [2]], "lora_path": [None, "a"]}, "lora_path is not supported"),
        ({"input_ids": [1], "image_data": "x"}, "image_data is not supported"),
        ({"input_ids": [1], "rid": 7}, "rid must be a string"),
        ({"input_ids": [1], "logprob_start_len": 4, "return_logprob": True}, "is after the prompt"),
    ],
)
def test_malformed_requests_get_400_and_a_reason(engine: EngineProcess, body: Any, reason: str) -> None:
    status, answer = engine.post("/generate", body)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_fields_without_effect_are_ignored_and_logged_once(engine: EngineProcess) -> None:
    params = {"temperature": 0, "max_new_tokens": 3}
    plain = engine.post("/generate", {"input_ids": [5, 6], "sampling_params": params})[1]["output_ids"]
    neutral = {"custom_params": {"return_top_p_token_ids": True}, "spaces_between_special_tokens": False, "regex": None}
    fields = {
        "image_data": None,
        "lora_path": None,
        "session_params": {},
        "bootstrap_room": 7,
        "priority": 3,
        "log_metrics": True,
        "made_up": None,
    }
    for _ in range(2):
        body = {"input_ids": [5, 6], "sampling_params": {**params, **neutral}, **fields}
        status, answer = engine.post("/generate", body)
        assert (status, answer.get("output_ids")) == (200, plain)
    status, answers = engine.post("/generate", {"input_ids": [[5], [6]], "lora_path": [None, None]})
    assert (status, len(answers)) == (200, 2)
    log = engine.log.read_text()
    for name in ("sampling_params.custom_params", "sampling_params.regex", *fields):
        assert log.count(f"the field '{name}' of a request has no effect here") == 1, name


def test_rejects_unknown_paths_modes_and_empty_aborts(engine: EngineProcess) -> None:
    assert engine.get("/nothing")[0] == 404
    assert engine.post("/pause_generation", {"mode": "soon"})[0] == 400
    assert engine.post("/abort_request", {})[0] == 400
    assert engine.get("/health_generate")[0] == 200


def test_engine_lists_itself_as_worker_and_reports_its_load(engine: EngineProcess) -> None:
    assert engine.get("/workers") == (200, {"workers": [{"id": "0", "url": f"http://127.0.0.1:{engine.port}"}]})
    before = request_load(f"http://127.0.0.1:{engine.port}")
    engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    after = request_load(f"http://127.0.0.1:{engine.port}")
    assert before is not None
    assert after is not None
    assert (after.running, after.queued) == (0, 0)
    assert (after.generated or 0) - (before.generated or 0) == 3
    (rank,) = engine.get("/v1/loads?include=core")[1]["loads"]
    assert (rank["num_running_reqs"], rank["num_waiting_reqs"], rank["num_total_reqs"]) == (0, 0, 0)


def test_request_of_a_disconnected_client_is_aborted(engine: EngineProcess) -> None:
    body = json.dumps({"input_ids": [5], "sampling_params": LONG}).encode()
    for stream in (False, True):
        payload = body if not stream else body[:-1] + b', "stream": true}'
        with socket.create_connection(("127.0.0.1", engine.port)) as sock:
            head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
            engine.wait_running(1, lambda sock=sock: bool(select.select([sock], [], [], 0)[0]))
        deadline = time.monotonic() + 120
        while engine.get("/server_info")[1]["num_running_reqs"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1


def test_port_in_use_or_bad_folder_exits_with_2(engine: EngineProcess, qwen3_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slime.engine.embedded", "--model-path"]
    busy = subprocess.run([*command, str(qwen3_folder), "--port", str(engine.port)], capture_output=True, text=True)
    assert busy.returncode == 2
    assert f"error: cannot listen on 127.0.0.1:{engine.port}" in busy.stderr
    empty = subprocess.run([*command, str(tmp_path), "--port", "0"], capture_output=True, text=True)
    assert empty.returncode == 2
    assert empty.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in empty.stderr
