"""Failures of one request or command end only that one, never the engine or other requests."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch.distributed import ProcessGroupGloo

from slime.cluster.memory.regions import HostRegion, align_up
from slime.cluster.ports import free_port
from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.errors import RequestFailed
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.requests import ModelFacts, parse_generate
from slime.engine.embedded.scheduler import Sequence
from tests.engine.conftest import EngineProcess, Waiter
from tests.engine.orders import rank_zero
from tests.engine.test_numbers import generate, prompt, running_core
from tests.tiny_models import make_tokenizer

GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def bodies(*seeds: int) -> list[dict[str, Any]]:
    return [{"input_ids": prompt(seed, 5 + seed), "sampling_params": GREEDY} for seed in seeds]


def tokens(core: EngineCore, *seeds: int) -> list[list[int]]:
    return [seq.output_ids for seq in generate(core, bodies(*seeds))]


def test_cancelled_command_is_not_run(qwen3_folder: Path) -> None:
    with running_core(qwen3_folder) as core:
        busy, free, ran = threading.Event(), threading.Event(), threading.Event()

        def block() -> None:
            busy.set()
            assert free.wait(240)

        first = core.call(block)
        assert busy.wait(240)
        dropped = core.call(ran.set)
        assert dropped.cancel()
        free.set()
        first.result(240)
        assert core.call(lambda: "alive").result(240) == "alive"
        assert not ran.is_set()


def test_engine_survives_a_command_that_raises(qwen3_folder: Path) -> None:
    with running_core(qwen3_folder) as core:
        with pytest.raises(ZeroDivisionError):
            core.call(lambda: 1 // 0).result(240)
        assert [len(ids) for ids in tokens(core, 1)] == [6]


@pytest.mark.parametrize("shared", [1, 10, 19])
def test_evicts_a_cached_tail_while_its_prefix_is_in_use(qwen3_folder: Path, shared: int) -> None:
    """The tail of a cached prompt must be evicted although its prefix is in use."""
    first = prompt(1, 24)
    second = first[:shared] + prompt(2, 30 - shared)
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    with running_core(qwen3_folder, "--max-total-tokens", "32") as core:
        generate(core, [{"input_ids": first, "sampling_params": params}])
        [tight] = generate(core, [{"input_ids": second, "sampling_params": params}])
        assert tight.cached_tokens == shared
    with running_core(qwen3_folder, "--no-share-prefixes") as core:
        [roomy] = generate(core, [{"input_ids": second, "sampling_params": params}])
    assert tight.output_ids == roomy.output_ids


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("step", ["extend", "collect_extend", "launch", "collect"])
def test_sequence_whose_step_raises_fails_alone(
    qwen3_folder: Path, step: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bad` raises whenever it is in a step; the other sequences get the tokens that they get without it.

    With lookahead, later steps are in flight on top of the one that fails.
    """
    with running_core(qwen3_folder, "--chunked-prefill-size", "12") as core:
        core.runner.looks_ahead = ahead
        want = tokens(core, 1, 2, 3)
        core.flush_cache()
        bad = prompt(9, 14)
        runner = core.runner
        real_extend, real_launch, real_collect = runner.launch_extend, runner.launch, runner.collect

        def refuse(prompts: list[list[int]]) -> None:
            if bad in prompts:
                raise RuntimeError("broken on purpose")

        def extend(extends: list[Any]) -> Any:
            launched = real_extend(extends)
            if step == "extend":
                refuse([e.sequence.prompt_ids for e in extends])
            return launched, [e.sequence.prompt_ids for e in extends if step == "collect_extend"]

        def launch(running: list[Sequence], slots: Any, ahead: Any) -> Any:
            if step == "launch":
                refuse([s.prompt_ids for s in running])
            return real_launch(running, slots, ahead), [s.prompt_ids for s in running if step == "collect"]

        def collect(launched: Any) -> Any:
            refuse(launched[1])
            return real_collect(launched[0])

        monkeypatch.setattr(core.runner, "launch_extend", extend)
        monkeypatch.setattr(core.runner, "launch", launch)
        monkeypatch.setattr(core.runner, "collect", collect)
        scored = {"input_ids": bad, "sampling_params": GREEDY, "logprob_start_len": 0, "top_logprobs_num": 2}
        got = generate(core, [*bodies(1), scored, *bodies(2, 3)])
        assert [s.output_ids for s in got if s.prompt_ids != bad] == want
        assert all(len(s.logprobs) == 6 for s in got if s.prompt_ids != bad)
        [failed] = [s for s in got if s.prompt_ids == bad]
        assert failed.finish is not None
        assert (failed.finish["type"], failed.finish["status_code"]) == ("abort", 500)
        assert "broken on purpose" in failed.finish["message"]
        core.call(core.flush_cache).result(240)
        assert core.scheduler.cache.pool.free == core.loaded.capacity


@pytest.mark.parametrize("temperature", [0, 1])
def test_sequence_with_nan_logits_fails_alone(
    qwen3_folder: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are NaN from the third token on; the tokens drawn before are still in the answer."""
    with running_core(qwen3_folder) as core:
        want = tokens(core, 1, 2)
        core.flush_cache()
        bad, real = prompt(9, 14), core.runner._draw

        def spoiled(logits: Any, sequences: list[Sequence], ahead: Any) -> Any:
            for row, seq in zip(logits, sequences, strict=True):
                if seq.prompt_ids == bad and len(seq.output_ids) == 2:
                    row[7] = float("nan")
            return real(logits, sequences, ahead)

        monkeypatch.setattr(core.runner, "_draw", spoiled)
        params = {**GREEDY, "temperature": temperature}
        first, failed, last = generate(core, [*bodies(1), {"input_ids": bad, "sampling_params": params}, *bodies(2)])
        assert [first.output_ids, last.output_ids] == want
        assert failed.finish is not None
        assert failed.finish["status_code"] == 500
        assert "its logits are not numbers" in failed.finish["message"]
        assert len(failed.output_ids) == len(failed.logprobs) == 2


def test_failed_sample_aborts_the_others_of_its_batch(qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have left the engine when the caller gets the error."""
    bad = prompt(9, 14)
    params = {**GREEDY, "max_new_tokens": 200, "n": 2}
    batch = {"input_ids": [prompt(1, 6), bad, prompt(2, 7)], "sampling_params": params}

    async def ask(core: EngineCore) -> None:
        bridge = EngineBridge(core)
        bridge.facts = ModelFacts(make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, frozenset())
        requests, _ = parse_generate(batch, bridge.loaded)
        with pytest.raises(RequestFailed, match="its logits are not numbers"):
            await bridge.run(requests)
        assert core.scheduler.idle
        assert core.steps.counters.generated_tokens < 4 * 200

    with running_core(qwen3_folder) as core:
        real = core.runner._draw

        def spoiled(logits: Any, sequences: list[Sequence], ahead: Any) -> Any:
            for row, seq in zip(logits, sequences, strict=True):
                if seq.prompt_ids == bad and len(seq.output_ids) == 2:
                    row[7] = float("nan")
            return real(logits, sequences, ahead)

        monkeypatch.setattr(core.runner, "_draw", spoiled)
        asyncio.run(ask(core))


def test_prompt_scores_are_not_duplicated_when_a_step_is_retried(
    qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_core(qwen3_folder) as core:
        real, failures = core.runner.launch_extend, [1]

        def once(extends: list[Any]) -> Any:
            sampled = real(extends)
            if failures:
                failures.pop()
                raise RuntimeError("broken on purpose")
            return sampled

        body = {**bodies(4)[0], "logprob_start_len": 0, "top_logprobs_num": 2}
        monkeypatch.setattr(core.runner, "launch_extend", once)
        [again] = generate(core, [body])
        core.call(core.flush_cache).result(240)
        [plain] = generate(core, [body])
    assert (again.input_logprobs, again.output_ids) == (plain.input_logprobs, plain.output_ids)
    assert again.output_top == plain.output_top
    assert len(again.output_top) == 6


def test_detokenization_error_fails_only_its_request(qwen3_folder: Path) -> None:
    class Broken:
        def decode(self, ids: list[int], **how: Any) -> str:
            raise OverflowError("broken on purpose")

    with running_core(qwen3_folder) as core:
        want = tokens(core, 1)
        waiter = Waiter()
        sequences = []
        for tokenizer, stop in ((make_tokenizer(), None), (Broken(), ["x"])):
            facts = ModelFacts(tokenizer, core.loaded.vocab_size, core.loaded.context_len, frozenset())
            [request], _ = parse_generate({**bodies(1)[0], "sampling_params": {**GREEDY, "stop": stop}}, facts)
            sequences += request.sequences(facts, waiter.notify)
        core.submit(sequences)
        waiter.wait(2)
        assert sequences[0].output_ids == want[0]
        assert sequences[1].finish is not None
        assert "OverflowError" in sequences[1].finish["message"]
        assert tokens(core, 1) == want


def test_scheduler_error_aborts_all_requests_and_the_engine_recovers(
    qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_core(qwen3_folder) as core:
        want = tokens(core, 1, 2)
        real = core.scheduler.next_decode

        def once() -> Any:
            monkeypatch.setattr(core.scheduler, "next_decode", real)
            raise IndexError("broken on purpose")

        monkeypatch.setattr(core.scheduler, "next_decode", once)
        for seq in generate(core, bodies(1, 2)):
            assert seq.finish is not None
            assert (seq.finish["type"], seq.finish["status_code"]) == ("abort", 500)
        assert core.call(lambda: (core.scheduler.idle, core.scheduler.cache.pool.free)).result(240) == (
            True,
            core.loaded.capacity,
        )
        assert tokens(core, 1, 2) == want


def test_requests_aborted_by_an_update_leave_no_cached_prefix(qwen3_folder: Path) -> None:
    """Pausing and updating are one command if the engine shares memory with the trainer."""

    def swap() -> None:
        core.pause("abort")
        core.weights.apply(lambda: 0, "2", flush=True)
        core.resume()

    long = [{"input_ids": prompt(1, 24), "sampling_params": {**GREEDY, "max_new_tokens": 400}}]
    with running_core(qwen3_folder) as core, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generate, core, long)
        while not (asked.done() or any(seq.output_ids for seq in core.scheduler.running)):
            pass
        core.call(swap).result(240)
        assert core.call(lambda: core.scheduler.cache.tree.held).result(240) == 0
        [seq] = asked.result(240)
        assert seq.finish is not None
        assert seq.finish["type"] == "abort"


# over HTTP


def safetensors_blob(dtype: str, name: str = "lm_head.weight", size: int = 1) -> bytes:
    header = json.dumps({name: {"dtype": dtype, "shape": [2 * size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * size


def test_engine_survives_dropped_control_requests(engine: EngineProcess) -> None:
    before = engine.generate(**bodies(1)[0])["output_ids"]
    long = {"max_new_tokens": 400, "ignore_eos": True, "n": 8}
    asked = engine.in_background(lambda: engine.generate(input_ids=[5], sampling_params=long))
    engine.wait_running(8, asked.done)
    while not asked.done():  # most of these connections open and close during a step
        with socket.create_connection(("127.0.0.1", engine.port)) as sock:
            sock.sendall(b"GET /server_info HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert engine.generate(**bodies(1)[0])["output_ids"] == before


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("update_weights_from_distributed", {"names": [["a"]], "dtypes": ["float32"], "shapes": [[1]]}, "names"),
        ("update_weights_from_distributed", {"names": ["a"], "dtypes": [["float32"]], "shapes": [[1]]}, "dtypes"),
        ("update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [{}]}, "shapes"),
        ("update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [], "bucket": [3]}, "bucket"),
        ("update_weights_from_disk", {"model_path": ["a"]}, "model_path"),
        ("update_weights_from_disk", {"model_path": "\0"}, "model_path"),
        ("update_weights_from_disk", {"model_path": "a" * 5000}, "model_path"),
        ("update_weights_from_disk", {"model_path": "x", "flush_cache": "no"}, "flush_cache"),
        ("update_weights_from_disk", {"model_path": "x", "weight_version": [1]}, "weight_version"),
        ("update_weights_from_tensor", {"load_format": "safetensors_file", "paths": [["a"]]}, "paths"),
        ("update_weights_from_tensor", {"load_format": "safetensors_file", "paths": ["/dev/stdin"]}, "paths"),
        ("destroy_weights_update_group", {"group_name": ["a"]}, "group_name"),
        ("init_weights_update_group", {"master_address": "a/b", "master_port": 1, "rank_offset": 1, "world_size": 2},
         "master_address"),
        ("init_weights_update_group", {"master_address": "a", "master_port": 0, "rank_offset": 1, "world_size": 2},
         "master_port"),
        ("init_weights_update_group", {"master_address": "a", "master_port": 9, "rank_offset": 0, "world_size": 2},
         "rank_offset"),
        ("init_weights_update_group", {"master_address": "a", "master_port": 9, "rank_offset": 1, "world_size": 1},
         "world_size"),
        ("pause_generation", {"mode": ["abort"]}, "mode"),
        ("release_memory_occupation", {"tags": [["weights"]]}, "tags"),
        ("weights_checker", {"action": {}}, "action"),
        ("abort_request", {"rid": {}}, "rid"),
        ("generate", {"input_ids": [1], "sampling_params": {"logit_bias": {"²": 1}}}, "logit_bias"),
        ("generate", {"input_ids": [1], "sampling_params": {"stop_token_ids": [-400], "min_new_tokens": 1}},
         "stop_token_ids"),
        ("generate", {"input_ids": [1], "top_logprobs_num": 1 << 70}, "top_logprobs_num"),
    ],
)  # fmt: skip
def test_rejects_invalid_values_naming_the_parameter(
    engine: EngineProcess, route: str, body: dict[str, Any], param: str
) -> None:
    status, answer = engine.post(f"/{route}", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, 400)
    assert answer["error"]["type"] == "invalid_request_error"
    assert engine.get("/health_generate")[0] == 200


def test_fd_exhaustion_logs_few_lines_and_the_engine_recovers(engine: EngineProcess) -> None:
    pid, before = engine.process.pid, len(engine.log.read_text())
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert limits[0] >= min(65536 + 4096 + 256, limits[1])  # raised to cover the maximum number of queued samples
    highest = max(int(name.name) for name in Path(f"/proc/{pid}/fd").iterdir())
    clients = []
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        for _ in range(64):
            clients.append(socket.create_connection(("127.0.0.1", engine.port), timeout=60))
        deadline = time.monotonic() + 120
        while "Too many open files" not in engine.log.read_text()[before:]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for client in clients:
            client.close()
    assert engine.get("/health")[0] == 200
    assert len(engine.log.read_text()[before:].splitlines()) < 40


def test_invalid_http_requests_log_few_lines_without_traceback(engine: EngineProcess) -> None:
    before = len(engine.log.read_text())
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as client:
            client.sendall(b"GET /\x01 HTTP/1.1\r\n\r\n")
            client.recv(100)
    assert engine.get("/health")[0] == 200
    said = engine.log.read_text()[before:]
    assert "a client sent an invalid HTTP request" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 40


@pytest.mark.parametrize(
    "raw", [b"", b"nope", b"[" * 5000, b'{"input_ids": [NaN]}', b'{"text": "\\ud800"}', b"[]", b"\xff\xfe", b"9" * 9999]
)
def test_rejects_malformed_bodies(engine: EngineProcess, raw: bytes) -> None:
    status, answer = engine.post("/generate", raw)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_rejects_a_weight_index_that_is_a_folder(engine: EngineProcess, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").mkdir()
    status, answer = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert status == 400
    assert "is not a file" in answer["error"]["message"]
    assert engine.get("/health_generate")[0] == 200


def test_rejects_unsupported_dtypes_and_malformed_tensors(engine: EngineProcess, tmp_path: Path) -> None:
    for dtype in ("F4", "F8_E8M0", "F32"):
        blob = safetensors_blob(dtype)
        status, answer = engine.post("/update_weights_from_tensor", blob, "application/octet-stream")
        assert (status, answer["error"]["code"]) == (400, 400), dtype
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors_blob("F4"))
    status, answer = engine.post(
        "/update_weights_from_tensor", {"load_format": "safetensors_file", "paths": [str(path)]}
    )
    assert status == 400
    assert "F4" in answer["error"]["message"]
    assert engine.get("/server_info")[1]["stale"] is None
    assert engine.get("/health_generate")[0] == 200


def test_continue_while_memory_is_released_keeps_requests_waiting(engine: EngineProcess) -> None:
    before = engine.generate(**bodies(1)[0])["output_ids"]
    assert engine.post("/release_memory_occupation", {})[0] == 200
    assert engine.post("/continue_generation", {})[0] == 200
    asked = engine.in_background(lambda: engine.generate(**bodies(1)[0]))
    while engine.get("/server_info")[1]["num_waiting_reqs"] == 0:
        pass
    assert not asked.done()
    assert engine.post("/resume_memory_occupation", {})[0] == 200
    assert asked.result(240)["output_ids"] == before


def test_pause_survives_memory_release_and_resume(engine: EngineProcess) -> None:
    engine.post("/pause_generation", {"mode": "abort"})
    engine.post("/release_memory_occupation", {})
    engine.post("/resume_memory_occupation", {})
    assert engine.get("/health_generate")[1] == {"status": "paused"}
    engine.post("/continue_generation", {})
    assert engine.get("/health_generate")[1] == {"status": "ok"}


# orders sent while others are in progress


def reload_weights(engine: EngineProcess, folder: Path) -> None:
    assert engine.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "default"})[0] == 200


def test_requests_waiting_for_memory_fail_if_weights_were_discarded(engine: EngineProcess, qwen3_folder: Path) -> None:
    before = engine.generate(**bodies(1)[0])["output_ids"]
    assert engine.post("/release_memory_occupation", {"discard_weights": True})[0] == 200
    asked = engine.in_background(lambda: engine.post("/generate", bodies(1)[0]))
    while engine.get("/server_info")[1]["num_waiting_reqs"] == 0:
        pass
    assert engine.post("/resume_memory_occupation", {})[0] == 200
    status, answer = asked.result(240)
    assert (status, "released without a copy" in answer["error"]["message"]) == (503, True)
    reload_weights(engine, qwen3_folder)
    assert engine.generate(**bodies(1)[0])["output_ids"] == before


@pytest.mark.parametrize("tags", [["cuda_graph"], ["cuda_graph", "kv_cache"], ["weights", "kv_cache", "cuda_graph"]])
def test_resume_without_tags_resumes_all_released_memory(engine: EngineProcess, tags: list[str]) -> None:
    assert engine.post("/release_memory_occupation", {"tags": tags})[0] == 200
    assert engine.post("/resume_memory_occupation", {})[0] == 200
    assert engine.get("/health_generate")[1] == {"status": "ok"}


@pytest.mark.parametrize("way", ["bytes", "handle", "group"])
def test_partial_update_leaves_discarded_weights_stale(
    engine: EngineProcess, qwen3_folder: Path, tmp_path: Path, way: str
) -> None:
    """The weights are valid again once two parts of one version cover all tensors."""
    before = engine.generate(**bodies(1)[0])["output_ids"]
    weights = load_file(qwen3_folder / "model.safetensors")
    names = sorted(weights)
    trainer = join_trainer_group(engine, "parts") if way == "group" else None
    engine.post("/release_memory_occupation", {"discard_weights": True})
    engine.post("/resume_memory_occupation", {})

    def send(part: list[str]) -> None:
        tensors = {name: weights[name].contiguous() for name in part}
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        body: dict[str, Any] = {"names": part, "dtypes": ["float32"] * len(part), "shapes": shapes}
        body["weight_version"] = "default"
        if way == "bytes":
            status, answer = engine.post(
                "/update_weights_from_tensor?weight_version=default", save(tensors), "application/octet-stream"
            )
        elif way == "handle":
            pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
            padded = [torch.nn.functional.pad(piece, (0, align_up(len(piece)) - len(piece))) for piece in pieces]
            region = HostRegion.create(tmp_path / "region", sum(map(len, padded)))
            region.data.copy_(torch.cat(padded))
            status, answer = engine.post("/update_weights_from_handle", {**body, "region": str(region.path)})
        else:
            assert trainer is not None
            body["group_name"] = "parts"
            waiting = engine.in_background(lambda: engine.post("/update_weights_from_distributed", body))
            for tensor in tensors.values():
                trainer.broadcast(tensor, 0).wait()
            status, answer = waiting.result(240)
        assert status == 200, answer

    send(names[:1])
    status, answer = engine.post("/generate", bodies(1)[0])
    assert (status, "the weights are stale" in answer["error"]["message"]) == (503, True)
    send(names[1:])
    assert engine.generate(**bodies(1)[0])["output_ids"] == before
    if trainer is not None:
        assert engine.post("/destroy_weights_update_group", {"group_name": "parts"})[0] == 200


def join_trainer_group(engine: EngineProcess, name: str) -> ProcessGroupGloo:
    """Make the engine join a group and return the trainer's end of it."""
    port = free_port()
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    joining = engine.in_background(
        lambda: engine.post("/init_weights_update_group", {**meeting, "group_name": name, "backend": "gloo"})
    )
    trainer = rank_zero(name, port)
    assert joining.result(240)[0] == 200
    return trainer


def test_silent_trainer_blocks_no_request_and_leaving_ends_the_update(
    engine: EngineProcess, qwen3_folder: Path
) -> None:
    before = engine.generate(**bodies(1)[0])["output_ids"]
    trainer = join_trainer_group(engine, "silent")
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "silent"}
    updating = engine.in_background(lambda: engine.post("/update_weights_from_distributed", body))
    long = {"max_new_tokens": 400, "ignore_eos": True}
    asked = engine.in_background(lambda: engine.generate(input_ids=[5], sampling_params=long))
    engine.wait_running(1, asked.done)
    assert engine.post("/abort_request", {"abort_all": True})[0] == 200
    assert asked.result(240)["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert engine.generate(**bodies(1)[0])["output_ids"] == before
    assert not updating.done()
    assert engine.post("/destroy_weights_update_group", {"group_name": "silent"})[0] == 200
    status, answer = updating.result(240)
    assert (status, "was left before the bucket arrived" in answer["error"]["message"]) == (503, True)
    assert engine.generate(**bodies(1)[0])["output_ids"] == before
    del trainer


@pytest.mark.parametrize("way", ["the group is left", "the trainer dies"])
def test_incomplete_update_makes_the_weights_stale(engine: EngineProcess, qwen3_folder: Path, way: str) -> None:
    """The engine is paused while the rest may still arrive; afterwards requests and health checks get 503."""
    before = engine.generate(**bodies(1)[0])["output_ids"]
    norm = load_file(qwen3_folder / "model.safetensors")["model.norm.weight"]
    trainer = join_trainer_group(engine, way)
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": way}

    def announce(number: int) -> Any:
        bucket = {**body, "weight_version": "2", "bucket": [number, 3]}
        return engine.in_background(lambda: engine.post("/update_weights_from_distributed", bucket))

    first = announce(1)
    trainer.broadcast(norm, 0).wait()
    assert first.result(240)[0] == 200
    asked = engine.in_background(lambda: engine.post("/generate", bodies(1)[0]))
    assert engine.get("/health_generate") == (200, {"status": "paused"})
    if way == "the trainer dies":
        del trainer
        assert announce(2).result(240)[0] == 503
    else:
        assert engine.post("/destroy_weights_update_group", {"group_name": way})[0] == 200
    for status, answer in (asked.result(240), engine.get("/health_generate"), engine.post("/generate", bodies(1)[0])):
        assert (status, "only 1 of 3 buckets of version 2 arrived" in answer["error"]["message"]) == (503, True)
    if way == "the trainer dies":
        assert engine.post("/destroy_weights_update_group", {"group_name": way})[0] == 200
    reload_weights(engine, qwen3_folder)
    assert engine.get("/health_generate") == (200, {"status": "ok"})
    assert engine.generate(**bodies(1)[0])["output_ids"] == before


def test_rejects_a_bucket_out_of_order(engine: EngineProcess, qwen3_folder: Path) -> None:
    """The engine runs no step between the buckets of an update; another update in between cancels the first."""
    before = engine.generate(**bodies(1)[0])["output_ids"]
    norm = load_file(qwen3_folder / "model.safetensors")["model.norm.weight"]
    trainer = join_trainer_group(engine, "order")
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "order"}
    updating = engine.in_background(
        lambda: engine.post("/update_weights_from_distributed", {**body, "weight_version": "2", "bucket": [1, 2]})
    )
    trainer.broadcast(norm, 0).wait()
    assert updating.result(240)[0] == 200
    asked = engine.in_background(lambda: engine.generate(**bodies(1)[0]))
    while engine.get("/server_info")[1]["num_waiting_reqs"] == 0:
        pass
    reload_weights(engine, qwen3_folder)
    assert asked.result(240)["output_ids"] == before
    status, answer = engine.post("/update_weights_from_distributed", {**body, "weight_version": "2", "bucket": [2, 2]})
    assert (status, "does not follow bucket 1" in answer["error"]["message"]) == (409, True)
    assert engine.post("/destroy_weights_update_group", {"group_name": "order"})[0] == 200
    assert engine.generate(**bodies(1)[0])["output_ids"] == before
