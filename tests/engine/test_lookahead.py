"""Lookahead: steps launched before the last one is read give the same tokens.

The CPU decoder computes when a step is launched; with lookahead its results are read one step later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http.requests import ModelFacts, parse_generate
from slime.engine.embedded.scheduler import Sequence
from tests.engine.conftest import Waiter
from tests.engine.test_numbers import generate, prompt, reference_logprobs, running_core
from tests.tiny_models import make_model_folder, make_tokenizer


def bodies(count: int, **params: Any) -> list[dict[str, Any]]:
    """Requests of various prompt and response lengths; some end at a stop token."""
    return [
        {
            "input_ids": prompt(i, 3 + 11 * i % 37),
            "sampling_params": {
                "max_new_tokens": 1 + 7 * i % 29,
                "sampling_seed": i,
                "stop_token_ids": list(range(100, 110)),
                **params,
            },
        }
        for i in range(count)
    ]


SPECIAL = {"top_k": 20, "frequency_penalty": 0.5}

MIXTURES: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "they end": ([], bodies(20)),
    "they wait for rows": (["--max-running-requests", "4"], bodies(24)),
    "they wait for slots and give them back": (["--max-total-tokens", "90"], bodies(24, ignore_eos=True)),
    "prompts come in pieces": (["--chunked-prefill-size", "8", "--max-running-requests", "6"], bodies(16)),
    "prompts are shared": (["--max-running-requests", "6"], bodies(4, n=5)),
    "some are not plain": (["--max-running-requests", "6"], [*bodies(8), *bodies(4, **SPECIAL), *bodies(4)]),
}


def run(folder: Path, options: list[str], requests: list[dict[str, Any]], *, ahead: bool) -> list[Any]:
    with running_core(folder, *options) as core:
        core.runner.looks_ahead = ahead
        sequences = generate(core, requests)
        core.call(core.flush_cache).result(60)
        assert core.scheduler.cache.pool.free == core.loaded.capacity
        assert core.scheduler.free_rows == core.scheduler.max_running
        assert [seq.ahead for seq in sequences] == [0] * len(sequences)
    return [(seq.output_ids, seq.finish, seq.versions) for seq in sequences]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_lookahead_gives_the_same_tokens(mixture: str, qwen3_folder: Path) -> None:
    options, requests = MIXTURES[mixture]
    assert run(qwen3_folder, options, requests, ahead=True) == run(qwen3_folder, options, requests, ahead=False)


class LaunchRecorder:
    """Records every launch of an engine with lookahead: unread tokens of each sequence and queue lengths."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.decodes, self.extends = core, list[tuple[list[int], int, bool]](), list[tuple[int, int]]()
        launch, extend = core.runner.launch, core.runner.launch_extend
        core.runner.looks_ahead = True

        def watched(running: list[Sequence], slots: Any, ahead: list[int]) -> Any:
            self.decodes.append((list(ahead), len(core.scheduler.waiting), all(seq.finish is None for seq in running)))
            return launch(running, slots, ahead)

        def watched_extend(extends: list[Any]) -> Any:
            self.extends.append((sum(e.end - e.start for e in extends), len(core.scheduler.running)))
            return extend(extends)

        core.runner.launch, core.runner.launch_extend = watched, watched_extend  # type: ignore[method-assign]


def test_steps_are_launched_ahead_while_requests_queue_and_finish(qwen3_folder: Path) -> None:
    """Every decode step is launched before the last one is read."""
    with running_core(qwen3_folder, "--max-running-requests", "4") as core:
        watched = LaunchRecorder(core)
        generate(core, bodies(24, ignore_eos=True, stop_token_ids=None))
    assert all(any(ahead) for ahead, _, _ in watched.decodes)
    assert sum(waiting > 0 for _, waiting, _ in watched.decodes) > 20
    assert all(alive for _, _, alive in watched.decodes)  # a sequence that reaches its length is not in the next step


def test_long_prompt_chunks_alternate_with_decode_steps(qwen3_folder: Path) -> None:
    """A long prompt is prefilled in chunks of `mixed_tokens`, each followed by a decode step."""
    with running_core(qwen3_folder) as core:
        core.steps._turns.mixed_tokens = 10
        watched = LaunchRecorder(core)
        order: list[str] = []
        launch, extend = core.runner.launch, core.runner.launch_extend
        core.runner.launch = lambda *a: (order.append("decode"), launch(*a))[1]  # type: ignore[method-assign]
        core.runner.launch_extend = lambda *a: (order.append("extend"), extend(*a))[1]  # type: ignore[method-assign]
        params = {"max_new_tokens": 60, "ignore_eos": True}
        started = threading.Event()
        long = {"input_ids": prompt(3, 95), "sampling_params": {"max_new_tokens": 3}}
        with running_requests(core, [{"input_ids": prompt(i, 6), "sampling_params": params} for i in (1, 2)], started):
            assert started.wait(60)
            generate(core, [long])
    mixed = [tokens for tokens, running in watched.extends if running == 2]
    assert mixed == [10] * 9 + [5]
    first = next(i for i, what in enumerate(order) if what == "decode")
    assert "extend,extend" not in ",".join(order[first:])


def running_requests(
    core: EngineCore, requests: list[dict[str, Any]], started: threading.Event
) -> AbstractContextManager[list[Sequence]]:
    """Run requests during the `with` body; set `started` when the first two have a token."""

    class Running:
        def __enter__(self) -> list[Sequence]:
            facts = ModelFacts(make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, frozenset())
            self.waiter, self.sequences = Waiter(), list[Sequence]()

            def notify(seq: Sequence) -> None:
                if all(s.output_ids for s in self.sequences[:2]):
                    started.set()
                self.waiter.notify(seq)

            for body in requests:
                [request], _ = parse_generate({"return_logprob": True, "stream": True, **body}, facts)
                self.sequences += request.sequences(facts, notify)
            core.submit(self.sequences)
            return self.sequences

        def __exit__(self, *error: object) -> None:
            self.waiter.wait(len(self.sequences))

    return Running()


def _update(core: EngineCore, other: Path, sequences: list[Sequence]) -> None:
    core.call(lambda: core.weights.update_from_folder(str(other), "new", flush=True)).result(60)


def _abort(core: EngineCore, other: Path, sequences: list[Sequence]) -> None:
    core.call(lambda: core.abort_sequences(sequences[::3], "enough"), meets_steps=True).result(60)


def _retract(core: EngineCore, other: Path, sequences: list[Sequence]) -> None:
    core.call(lambda: (core.pause("retract"), core.resume())).result(60)


@pytest.mark.parametrize("command", [_update, _abort, _retract])
def test_commands_during_lookahead_keep_log_probs_and_slots_correct(
    command: Callable[[EngineCore, Path, list[Sequence]], None], qwen3_folder: Path, tmp_path: Path
) -> None:
    """Every token has the log-prob of the weights of its version, and no slot is lost."""
    other = make_model_folder(tmp_path / "other", seed=1)
    requests = [
        {"input_ids": prompt(i, 5 + i), "sampling_params": {"max_new_tokens": 80, "ignore_eos": True}}
        for i in range(12)
    ]
    with running_core(qwen3_folder, "--max-running-requests", "8") as core:
        core.runner.looks_ahead = True
        started = threading.Event()
        with running_requests(core, requests, started) as sequences:
            assert started.wait(60)
            command(core, other, sequences)
        core.call(core.flush_cache).result(60)
        assert core.scheduler.cache.pool.free == core.loaded.capacity
    for seq in sequences:
        assert seq.finish is not None
        if seq.finish["type"] == "abort":
            assert command is _abort
            continue
        assert len(seq.output_ids) == 80
        spans = dict(seq.versions)
        end = spans.get("new", 80)
        old = reference_logprobs(qwen3_folder, seq)
        torch.testing.assert_close(torch.tensor(seq.logprobs)[:end], old[:end], atol=2e-5, rtol=0)
    if command is _update:
        assert {version for seq in sequences for version, _ in seq.versions} == {"default", "new"}
        late = [seq for seq in sequences if seq.versions[0][0] == "new"]
        for seq in late:
            new = reference_logprobs(other, seq)
            torch.testing.assert_close(torch.tensor(seq.logprobs), new, atol=2e-5, rtol=0)
