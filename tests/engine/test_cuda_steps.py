"""The decoder for CUDA with its graphs and kernels spelled out on the CPU: same tokens as the CPU's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.table_body import decode_as_on_cuda
from tests.engine.test_numbers import generate, prompt, running_core


def mixture() -> list[dict[str, Any]]:
    """Lengths, stop tokens, seeds, a shared prefix, scored prompts and what the plain draw cannot do."""
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
def test_tokens_are_those_of_the_cpu(qwen3_folder: Path, options: tuple[str, ...]) -> None:
    answers = []
    for as_on_cuda in (False, True):
        with running_core(qwen3_folder, *options) as core:
            if as_on_cuda:
                core.call(lambda: decode_as_on_cuda(core)).result()
            sequences = generate(core, mixture())
            core.call(core.flush_cache).result()
            assert core.scheduler.cache.pool.free == core.capacity
        answers.append([(s.output_ids, s.finish, len(s.input_logprobs), len(s.output_top)) for s in sequences])
    assert answers[0] == answers[1]
    assert {finish["type"] for _, finish, _, _ in answers[0] if finish} == {"stop", "length"}
