"""Self-test at model load: compares the engine's log-probs with those of a plain forward of the model.

Short prompts run through a plain forward, then as one batch through the engine, with one decode step each. On a GPU
one and two of them also run alone, because few sequences use separate kernels. The comparison fails for a model that
keeps state outside the KV slots or mixes the tokens of a row.

    served through transformers     its weights against transformers' eager forward, in the engine's dtype, with
                                    prompts longer than windows of up to 64 tokens; and a small model of the config in
                                    float32, whose narrow windows, uneven attention and precision reveal errors that
                                    the weights or rounding may hide
    by fused kernels                its weights against the plain operations of its block, which tests compare with
                                    transformers; against transformers if that loaded the weights

Invariant: for a model that passes, the engine gave the arg-max of the plain forward, with its log-prob, at every
position.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from slime.engine.embedded.model.runner import ModelRunner, StepDecoder
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Extend, Sequence
from slime.errors import UserError
from slime.models.folder import first_line
from slime.models.windows import window_fields
from slime.storage.json_types import JsonMapping

if TYPE_CHECKING:  # importing transformers takes longer than the rest of a start
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

PROMPT_LENGTHS = (3, 17, 9)
FUSED_PROMPT_LENGTHS = (3, 5, 4)  # prompt lengths for fused models
_WIDEST_TESTED = 64  # widest window that prompts are made longer than
# Tolerated log-prob error, in standard deviations of the position's log-probs. A wrong computation is off by whole
# standard deviations; rounding by 1e-5 in float32 and by up to 0.1 in half precision.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.5
_ATTEMPTS = 3
"""Random token draws before a mismatch counts: a token with tied experts may use either, but a wrong computation
differs for every draw."""


class NumericsMismatch(UserError):
    """Raised when the engine's log-probs differ from those of the model's plain forward."""


@contextmanager
def refuse_model_errors(model_type: str) -> Iterator[None]:
    """Turn errors of model code, which is not called as transformers calls it, into a refusal of one sentence."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as cause:
        raise NumericsMismatch(
            f"the embedded engine cannot compute {model_type} models ({first_line(cause)}): serve it with SGLang "
            "instead"
        ) from cause


def exact_length_limit(facts: JsonMapping) -> tuple[int, str] | None:
    """Return the length up to which the engine matches the model of this (text) config, and what changes there.

    None: no limit. Beyond their original length, the rotary frequencies of `dynamic` and `longrope` models change, so
    cached keys would be wrong.
    """
    given = facts.get("rope_parameters") or {}
    limits = []
    for rope in given.values() if all(isinstance(value, dict) for value in given.values()) else [given]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append((int(rope["original_max_position_embeddings"]), "changes its rotary frequencies"))
        elif "dynamic" in kind:
            limits.append((int(facts["max_position_embeddings"]), "changes its rotary frequencies"))
    if isinstance(topk := facts.get("index_topk"), int):
        limits.append((topk, "does not attend to every token"))
    return min(limits, default=None)


def eager_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits `[B, T, V]` of transformers' forward of tokens `[B, T]`."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def check_small_variant(model: PreTrainedModel) -> None:
    """Compare the engine with a small model of this class and config; raises if the log-probs differ.

    If transformers cannot make a small model, the model passes unless its windows are wide: no other check covers wide
    windows.
    """
    from slime.models.small import small_model

    try:
        compare_small_model(lambda: small_model(type(model), model.config))
    except NumericsMismatch:
        raise
    except UserError as cause:
        if max(window_fields(model.config.get_text_config().to_dict()).values(), default=0) > _WIDEST_TESTED:
            raise
        log.info("self-test: no small model, only the model's own weights are compared: %s", cause)


def compare_small_model(make: Callable[[], PreTrainedModel]) -> None:
    """Compare the engine with eager small models, one from `make` per draw; raises if all log-probs differ."""
    wrong = None
    for seed in range(_ATTEMPTS):
        small = make()
        facts = small.config.get_text_config().to_dict()
        limit = exact_length_limit(facts)
        try:
            plain = PlainForward(
                partial(eager_logits, small),
                facts,
                torch.empty(0),
                context_len=sys.maxsize if limit is None else limit[0],
                seed=seed,
            )
        except Exception as cause:  # a family's code may raise anything for rows of several lengths
            raise UserError(
                f"transformers cannot compute a small {small.config.model_type} model ({first_line(cause)}), so its "
                "log-probs cannot be compared: choose another model"
            ) from cause
        table = np.zeros((len(PROMPT_LENGTHS) + 1, 2 * _WIDEST_TESTED), dtype=np.int32)
        with refuse_model_errors(facts["model_type"]):
            runner = ModelRunner(small, table)
            runner.allocate_kv(plain.slots)
        try:
            plain.compare(runner, runner, table)
            return
        except NumericsMismatch as error:
            wrong = error
    assert wrong is not None
    raise wrong


class PlainForward:
    """Reference log-probs of the test prompts, from one call of `logits`, which maps tokens `[B, T]` to `[B, T, V]`.

    `facts` is the (text) config, and `weight` any weight of the model. One prompt is longer than the model's windows,
    unless these are wide.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        facts: JsonMapping,
        weight: torch.Tensor,
        *,
        context_len: int,
        is_fused: bool = False,
        seed: int = 0,
    ) -> None:
        self._model_type: str = facts["model_type"]
        self._dtype = weight.dtype
        short, middle, last = FUSED_PROMPT_LENGTHS if is_fused else PROMPT_LENGTHS
        widths = [width for width in window_fields(facts).values() if width <= _WIDEST_TESTED]
        wanted = (short, max([middle, *(width + 3 for width in widths)]), last)
        lengths = [max(1, min(length, context_len - 1)) for length in wanted]
        self.slots = sum(lengths) + len(lengths)  # slots that `compare` writes to
        generator = np.random.default_rng(seed)
        self._tokens = [generator.integers(0, facts["vocab_size"], length + 1).tolist() for length in lengths]
        padded = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int64)
        for row, tokens in zip(padded, self._tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        with torch.inference_mode():
            found = logits(padded.to(weight.device)).float()
        # [prompt, its end or the token after it, V]; neither sees the padding after it
        ends = [found[i, length - 1 : length + 1] for i, length in enumerate(lengths)]
        self._log_probs = torch.stack(ends).log_softmax(-1).cpu()
        if not bool(torch.isfinite(self._log_probs).all()):
            raise UserError(
                f"the logits of this {self._model_type} model are not finite in {self._dtype}: choose another --dtype "
                "or check its weights"
            )

    def compare(self, runner: ModelRunner, decoder: StepDecoder, table: np.ndarray) -> None:
        """Run the prompts through the engine; raises if its log-probs differ."""
        batches = self.batches(len(table) - 1, runner.cuda)
        with refuse_model_errors(self._model_type):
            worst = max((self._run(members, runner, decoder, table) for members in batches), key=lambda gap: gap[0])
        runner.context.window.forget()
        gap, difference = worst
        if not gap <= _TOLERANCE.get(self._dtype, _HALF_TOLERANCE):
            raise NumericsMismatch(
                f"the embedded engine computes {self._model_type} models wrongly (a log-prob differs by "
                f"{difference:.2g} from its plain forward): serve it with SGLang instead"
            )

    def batches(self, most: int, cuda: bool) -> list[list[int]]:
        """Return the batches of prompts: all prompts in batches of up to `most`; on a GPU also two and one alone."""
        prompts = list(range(len(self._tokens)))
        whole = [prompts[i : i + most] for i in range(0, len(prompts), most)]
        return [*whole, *(prompts[:few] for few in (2, 1) if cuda and few < len(whole[0]))]

    def _run(
        self, members: SequenceOf[int], runner: ModelRunner, decoder: StepDecoder, table: np.ndarray
    ) -> tuple[float, float]:
        greedy = SamplingParams(temperature=0.0)
        sequences = [
            Sequence("check", self._tokens[i][:-1], greedy, frozenset(), 2, notify=lambda seq: None, row=row)
            for row, i in enumerate(members)
        ]
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
        """Return the error in standard deviations and in nats.

        It is the larger of two: from the plain log-prob of the token, and of that from the arg-max's.
        """
        plain = self._log_probs[prompt, at]
        expected = float(plain[token])
        difference = max(abs(logprob - expected), float(plain.max()) - expected)
        if not math.isfinite(difference):
            return math.inf, difference
        return difference / max(float(plain.std()), 1e-6), difference
