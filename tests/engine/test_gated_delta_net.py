"""Layers with a recurrent state per sequence: the engine's log-probs match transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.model.gated_delta_net import delta_rule, delta_step
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.scheduler import Sequence
from slime.errors import UserError
from tests.engine.test_numbers import (
    ARCHITECTURES,
    DELTA_ROUNDING,
    generate,
    prompt,
    reference_logprobs,
    running_core,
)
from tests.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts: rounding decides between tied experts, which would change tokens."""
    place = tmp_path_factory.mktemp("delta") / "qwen3_5"
    return make_model_folder(place, "qwen3_5_text", **ARCHITECTURES["qwen3_5_text"])


def assert_right(folder: Path, sequences: list[Sequence]) -> None:
    for seq in sequences:
        want = reference_logprobs(folder, seq)
        torch.testing.assert_close(torch.tensor(seq.logprobs), want, atol=DELTA_ROUNDING, rtol=0)


def test_chunked_delta_rule_matches_single_steps() -> None:
    torch.manual_seed(0)
    b, m, h, dim, width = 2, 150, 3, 8, 5
    q, k = (torch.nn.functional.normalize(torch.randn(b, m, h, dim), dim=-1) for _ in range(2))
    v, beta, decay = torch.randn(b, m, h, width), torch.rand(b, m, h), -torch.rand(b, m, h)
    begin = state = torch.randn(b, h, dim, width)
    steps = []
    for i in range(m):
        out, state = delta_step(q[:, i], k[:, i], v[:, i], decay[:, i], beta[:, i], state)
        steps.append(out)
    found, end = delta_rule(q, k, v, decay, beta, begin)
    torch.testing.assert_close(found, torch.stack(steps, 1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(end, state, atol=1e-5, rtol=1e-4)


def test_retracted_sequences_and_chunked_prompts_match_transformers(folder: Path) -> None:
    options = ["--max-total-tokens", "150", "--max-running-requests", "4", "--chunked-prefill-size", "16"]
    with running_core(folder, *options) as core:
        bodies = [
            {"input_ids": prompt(i, n), "sampling_params": {"max_new_tokens": 24}}
            for i, n in enumerate((70, 9, 9, 20, 5, 31))
        ]
        sequences = generate(core, bodies)
        assert core.scheduler.retractions > 0
    assert_right(folder, sequences)


def test_samples_of_one_prompt_share_no_prefix_and_run_together(folder: Path) -> None:
    """A state cannot be cut at a prefix: nothing is shared, and no sample waits for another's prompt."""
    with running_core(folder) as core:
        sequences = generate(core, [{"input_ids": prompt(1, 30), "sampling_params": {"max_new_tokens": 4, "n": 5}}])
        assert [seq.cached_tokens for seq in sequences] == [0] * 5
        assert core.steps.counters.steps == 1 + 3
        follow_up = {"input_ids": sequences[0].tokens + prompt(2, 3), "sampling_params": {"max_new_tokens": 4}}
        sequences += generate(core, [follow_up])
    assert_right(folder, sequences)


@pytest.mark.parametrize("step", ["extend", "launch"])
def test_failed_step_leaves_no_state(folder: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing raises twice after the states were written; then the same sequences run one at a time."""
    with running_core(folder) as core:
        whole = core.runner._draw
        calls: list[int] = []

        def draw(logits: torch.Tensor, sequences: list[Sequence], ahead: list[int]) -> Any:
            drawn = min(len(seq.output_ids) for seq in sequences)
            if len(sequences) > 1 and drawn == (0 if step == "extend" else 3):
                calls.append(drawn)
                raise ArithmeticError("for once")
            return whole(logits, sequences, ahead)

        monkeypatch.setattr(core.runner, "_draw", draw)
        bodies = [{"input_ids": prompt(i, 6 + i), "sampling_params": {"max_new_tokens": 9}} for i in range(3)]
        sequences = generate(core, bodies)
    assert calls
    assert [len(seq.output_ids) for seq in sequences] == [9] * 3
    assert_right(folder, sequences)


def test_lookahead_log_probs_match_transformers(folder: Path) -> None:
    with running_core(folder) as core:
        core.runner.looks_ahead = True
        params = {"max_new_tokens": 12, "stop_token_ids": list(range(100, 180))}
        sequences = generate(core, [{"input_ids": prompt(i, 6), "sampling_params": params} for i in range(8)])
        assert any(len(seq.output_ids) < 12 for seq in sequences)
        sequences += generate(core, [{"input_ids": prompt(9, 7), "sampling_params": {"max_new_tokens": 5}}])
    assert_right(folder, sequences)


def test_update_from_folder_loads_the_new_weights(folder: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", "qwen3_5_text", seed=1, **ARCHITECTURES["qwen3_5_text"])
    with running_core(folder) as core:
        core.call(lambda: core.weights.update_from_folder(str(other), "1", flush=True)).result()
        sequences = generate(core, [{"input_ids": prompt(4, 9), "sampling_params": {"max_new_tokens": 5}}])
    assert_right(other, sequences)


def test_rejects_states_that_do_not_fit_and_gives_their_size(folder: Path) -> None:
    options = parse_options(["--model-path", str(folder), "--max-running-requests", "9999", "--mem-fraction", "1e-9"])
    core = EngineCore(options, on_death=lambda error: None)
    with pytest.raises(UserError, match=r"the states of 9999 running requests take 0\.\d GiB"):
        core.load("cpu")
