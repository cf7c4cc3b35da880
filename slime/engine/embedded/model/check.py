"""Whether the engine computes what transformers does: tried once, when a model is loaded.

Two short prompts go through transformers' own forward, then side by side through the engine, with one decode step each.
A model that keeps state beside the KV slots, or mixes the tokens of a row, gives other numbers there.
Invariant: a model that passes gave the arg-max of its plain forward, with its log-prob, at all four positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from slime.engine.embedded.model.runner import Decoder, ModelRunner
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Extend
from slime.engine.embedded.sequence import Sequence
from slime.errors import UserError

PROMPT_LENGTHS = (3, 5)
SLOTS = sum(PROMPT_LENGTHS) + len(PROMPT_LENGTHS)  # what the check writes to
# How far a log-prob may be off, in standard deviations of the position's log-probs. What is computed wrongly is off by
# whole ones; rounding by a hundred-thousandth in float32, and by up to a tenth in half precision.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.5


def exact_until(config: PretrainedConfig) -> tuple[int, str] | None:
    """The length up to which the engine computes what the model does, and what changes there; None: for ever."""
    facts = config.to_dict()
    limits = [(limit, "changes its rotary frequencies") for limit in _same_rope_until(config, facts)]
    if isinstance(topk := facts.get("index_topk"), int):
        limits.append((topk, "does not attend to every token"))
    return min(limits, default=None)


def _same_rope_until(config: PretrainedConfig, facts: dict[str, Any]) -> list[int]:
    """Keys that are kept would not stay right: the frequencies of `dynamic` and `longrope` models are others behind."""
    given = facts.get("rope_parameters") or {}
    limits = []
    for rope in given.values() if all(isinstance(value, dict) for value in given.values()) else [given]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings))
    return limits


class PlainNumbers:
    """What transformers' own forward says of the prompts; taken before the engine changes anything about the model."""

    def __init__(self, model: PreTrainedModel, context_len: int) -> None:
        config = model.config.get_text_config()
        self._model_type: str = config.model_type
        self._dtype = model.dtype
        lengths = [max(1, min(length, context_len - 1)) for length in PROMPT_LENGTHS]
        generator = np.random.default_rng(0)
        self._tokens = [generator.integers(0, config.vocab_size, length + 1).tolist() for length in lengths]
        padded = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int64)
        for row, tokens in zip(padded, self._tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        with torch.inference_mode():
            logits = model(input_ids=padded.to(model.device), use_cache=False).logits.float()
        # [prompt, its end or the token after it, V]; what stands behind in a row is seen by neither
        ends = [logits[i, length - 1 : length + 1] for i, length in enumerate(lengths)]
        self._log_probs = torch.stack(ends).log_softmax(-1).cpu()
        if not bool(torch.isfinite(self._log_probs).all()):
            raise UserError(
                f"this {self._model_type} model gives numbers that are not finite in {self._dtype}: choose another "
                "--dtype, or look at its weights"
            )

    def compare(self, runner: ModelRunner, decoder: Decoder, table: np.ndarray) -> None:
        """Let the engine compute the same; raises UserError where it does not."""
        together = [[0, 1]] if len(table) > 2 else [[0], [1]]  # the last row is padding's
        worst = max((self._run(members, runner, decoder, table) for members in together), key=lambda gap: gap[0])
        runner.context.window.forget()
        gap, difference = worst
        if not gap <= _TOLERANCE.get(self._dtype, _HALF_TOLERANCE):
            raise UserError(
                f"the embedded engine computes {self._model_type} models wrongly (a log-prob differs by "
                f"{difference:.2g} from transformers' own): serve it with SGLang instead"
            )

    def _run(
        self, members: SequenceOf[int], runner: ModelRunner, decoder: Decoder, table: np.ndarray
    ) -> tuple[float, float]:
        sequences = [_greedy(self._tokens[i][:-1], row) for row, i in enumerate(members)]
        extends, free = [], 1
        for seq in sequences:
            slots = np.arange(free, free + seq.length)
            table[seq.row, : seq.length] = slots
            extends.append(Extend(seq, 0, seq.length, slots))
            free += seq.length
        first = decoder.collect(decoder.launch_extend(extends))
        for seq, i in zip(sequences, members, strict=True):
            seq.output_ids.append(self._tokens[i][-1])
        slots = np.arange(free, free + len(sequences))
        second = decoder.collect(decoder.launch(sequences, slots, [0] * len(sequences)))
        return max(
            self._gap(i, at, token, logprob)
            for at, sampled in enumerate((first, second))
            for i, token, logprob in zip(members, *sampled, strict=True)
        )

    def _gap(self, prompt: int, at: int, token: int, logprob: float) -> tuple[float, float]:
        """In standard deviations, and as it is: from the plain log-prob, and of that from the arg-max's."""
        plain = self._log_probs[prompt, at]
        expected = float(plain[token])
        difference = max(abs(logprob - expected), float(plain.max()) - expected)
        if not math.isfinite(difference):
            return math.inf, difference
        return difference / max(float(plain.std()), 1e-6), difference


def _greedy(prompt: list[int], row: int) -> Sequence:
    params = SamplingParams(temperature=0.0)
    return Sequence("check", prompt, params, frozenset(), 2, notify=lambda seq: None, row=row)
