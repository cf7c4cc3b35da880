"""Limits of sampling parameters and the draws at their extremes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from slime.engine.embedded.errors import BadRequest
from slime.engine.embedded.model.cpu_sampler import draw_each
from slime.engine.embedded.sampling_params import parse_sampling_params
from slime.engine.embedded.scheduler import Sequence

VOCAB = 12


def sequence(**raw: Any) -> Sequence:
    params = parse_sampling_params(raw, vocab_size=VOCAB)
    return Sequence("rid", [1, 2, 3], params, frozenset({5}), 9, notify=lambda seq: None, output_ids=[3, 4, 4])


@pytest.mark.parametrize(
    "raw",
    [
        '{"temperature": NaN}',
        '{"temperature": Infinity}',
        '{"temperature": 1e39}',
        f'{{"temperature": 1{"0" * 400}}}',
        '{"temperature": -1e-9}',
        '{"repetition_penalty": 0}',
        '{"repetition_penalty": 1e-40}',
        '{"repetition_penalty": NaN}',
        '{"frequency_penalty": NaN}',
        '{"presence_penalty": Infinity}',
        '{"logit_bias": {"3": NaN}}',
        '{"logit_bias": {"3": -Infinity}}',
        '{"logit_bias": {"3": 1e38}}',
        '{"logit_bias": {"3": true}}',
        '{"logit_bias": {"\\u00b2": 1}}',
        f'{{"min_new_tokens": 1, "stop_token_ids": {list(range(VOCAB))}}}',
    ],
)
def test_rejects_invalid_sampling_parameters(raw: str) -> None:
    with pytest.raises(BadRequest):
        parse_sampling_params(json.loads(raw), vocab_size=VOCAB)


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-7])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """As in SGLang: the arg-max, with the log-probs of temperature 1."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 30
    cold = sequence(temperature=temperature)
    assert cold.params.greedy
    token, logprob = draw_each(logits, [cold], torch.tensor([0.99]), torch.tensor([True]))
    assert int(token) == int(logits.argmax())
    assert float(logprob) == pytest.approx(float(logits.log_softmax(-1).max()))


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": 1e-6},
        {"temperature": 3e38, "min_new_tokens": 9},
        {"repetition_penalty": 1e-6, "temperature": 1e-6},
        {"logit_bias": {"3": 1e30, "4": -1e30}, "temperature": 1e-6},
        {"frequency_penalty": 2, "presence_penalty": -2, "top_p": 1e-9, "min_p": 1.0},
    ],
)
def test_extreme_accepted_parameters_give_finite_log_probs(raw: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 100
    token, logprob = draw_each(logits, [sequence(**raw)], torch.tensor([0.5]), torch.tensor([False]))
    assert 0 <= int(token) < VOCAB
    assert torch.isfinite(logprob).all()
