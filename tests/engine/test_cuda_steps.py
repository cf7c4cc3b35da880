"""The CUDA decoder with graphs and kernels emulated on the CPU gives the tokens of the CPU decoder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.options import parse_options
from tests.engine.table_body import decode_as_on_cuda
from tests.engine.test_numbers import generate, prompt, running_core


def mixture() -> list[dict[str, Any]]:
    """Requests with various lengths, stop tokens, seeds, shared prefixes, scored prompts and special sampling."""
    plain = [
        {
            "input_ids": prompt(i, 4 + 7 * i % 40),
            "sampling_params": {
                "max_new_tokens": 1 + 5 * i % 23,
                "temperature": (0.0, 0.6, 1.0)[i % 3],
                "sampling_seed": i,
                "stop_token_ids": list(range(100, 112)),
            },
        }
        for i in range(12)
    ]
    seeded = {"max_new_tokens": 9, "sampling_seed": 7}
    special = [
        {"input_ids": prompt(1, 30), "sampling_params": {**seeded, "top_p": 0.5, "repetition_penalty": 1.3}},
        {"input_ids": prompt(1, 33), "sampling_params": {**seeded, "n": 3}},
        {"input_ids": prompt(2, 20), "sampling_params": {**seeded, "min_new_tokens": 4}, "top_logprobs_num": 2},
        {"input_ids": prompt(2, 25), "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 3},
    ]
    return plain + special


@pytest.mark.parametrize("options", [(), ("--chunked-prefill-size", "24", "--max-running-requests", "5")])
def test_cuda_decoder_gives_the_tokens_of_the_cpu_decoder(qwen3_folder: Path, options: tuple[str, ...]) -> None:
    answers = []
    for as_on_cuda in (False, True):
        with running_core(qwen3_folder, *options) as core:
            if as_on_cuda:
                core.call(lambda: decode_as_on_cuda(core)).result()
            sequences = generate(core, mixture())
            core.call(core.flush_cache).result()
            assert core.scheduler.cache.pool.free == core.loaded.capacity
        answers.append([(s.output_ids, s.finish, len(s.input_logprobs), len(s.output_top)) for s in sequences])
    assert answers[0] == answers[1]
    assert {finish["type"] for _, finish, _, _ in answers[0] if finish} == {"stop", "length"}


def test_smallest_and_largest_graphs_are_captured_first(qwen3_folder: Path) -> None:
    """Any batch can be decoded from the start; an idle engine captures the remaining graphs."""
    core = EngineCore(
        parse_options(["--model-path", str(qwen3_folder), "--max-running-requests", "40"]), on_death=print
    )
    core.load("cpu")
    decoder = decode_as_on_cuda(core)
    captured: list[list[int]] = []
    launch, capture = decoder.launch, decoder.capture_next
    everything = threading.Event()

    def watched(running: Any, slots: Any, ahead: Any) -> Any:
        captured.append(sorted(decoder._graphs))
        return launch(running, slots, ahead)

    def capture_next() -> bool:
        goes_on = capture()
        if not goes_on:
            everything.set()
        return goes_on

    decoder.launch, decoder.capture_next = watched, capture_next  # type: ignore[method-assign]
    submit = core.submit
    core.submit = lambda sequences: (submit(sequences), core.start())  # type: ignore[method-assign,assignment,return-value]
    generate(core, mixture())  # the requests arrive before the engine is idle
    core.submit = submit  # type: ignore[method-assign]
    assert everything.wait(60)
    generate(core, mixture())
    core.stop()
    assert captured[0] == [1, 40]
    assert captured[-1] == [1, 2, 4, 8, 16, 32, 40]
    assert sorted(decoder._prompts) == [128, 256, 512, 1024, 2048]


def test_graphs_that_fail_to_capture_are_skipped(qwen3_folder: Path) -> None:
    with running_core(qwen3_folder, "--max-running-requests", "40") as core:
        want = [seq.output_ids for seq in generate(core, mixture())]
        decoder = core.call(lambda: decode_as_on_cuda(core)).result(60)
        captured = decoder._captured
        failures = iter([False, True] * 10)

        def every_second(run: Any) -> Any:
            if next(failures):
                raise MemoryError("for once")
            return captured(run)

        def capture_all() -> tuple[list[int], list[int]]:
            decoder._uncaptured, decoder._uncaptured_prompts = [16, 8, 4], [512, 256, 128]
            decoder._prompts, decoder._graphs = {}, {size: decoder._graphs[size] for size in (1, 40)}
            decoder._captured = every_second  # type: ignore[method-assign]
            while decoder.capture_next():
                pass
            return sorted(decoder._graphs), sorted(decoder._prompts)

        assert core.call(capture_all).result(60) == ([1, 4, 16, 40], [256])
        core.call(core.flush_cache).result(60)
        assert [seq.output_ids for seq in generate(core, mixture())] == want
