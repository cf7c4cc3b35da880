"""Whether the engine computes what the model does: tried once, when a model is loaded.

Short prompts go through a plain forward, then side by side through the engine, with one decode step each; on a GPU one
and two of them alone as well, because few sequences go through kernels of their own. A model that keeps state beside
the KV slots, or mixes the tokens of a row, gives other numbers there.

    served through transformers     its own weights against transformers' eager forward, in the engine's dtype, with
                                    prompts longer than windows of up to 64 tokens; and a small model of the config in
                                    float32, whose narrow windows, uneven attention and precision show what the weights
                                    or rounding may hide
    by fused kernels                its own weights against the plain operations of its block, whose numbers tests
                                    compare with transformers; against transformers where that loaded the weights

Invariant: a model that passes gave the arg-max of its plain forward, with its log-prob, at every position.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime.engine.embedded.model.runner import Decoder, ModelRunner
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Extend, Sequence
from slime.errors import UserError
from slime.models.folder import first_line
from slime.models.windows import window_fields

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

PROMPT_LENGTHS = (3, 17, 9)
FEW_TOKENS = (3, 5, 4)  # of a block that the fused kernels compute
_WIDE = 64  # windows that prompts are not made longer than
# How far a log-prob may be off, in standard deviations of the position's log-probs. What is computed wrongly is off by
# whole ones; rounding by a hundred-thousandth in float32, and by up to a tenth in half precision.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.5
_DRAWS = 3
"""A token that two experts suit equally may go to either; what is computed wrongly differs for all draws of tokens."""


class WrongNumbers(UserError):
    """What the engine computes is not what the model does."""


@contextmanager
def refusing(model_type: str) -> Iterator[None]:
    """What model code raises where it is not called as transformers calls it, as one sentence."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as cause:
        raise WrongNumbers(
            f"the embedded engine cannot compute {model_type} models ({first_line(cause)}): serve it with SGLang "
            "instead"
        ) from cause


def exact_until(facts: Mapping[str, Any]) -> tuple[int, str] | None:
    """The length up to which the engine computes what the model of this (text) config does, and what changes there.

    None: it does for ever.
    """
    limits = [(limit, "changes its rotary frequencies") for limit in _same_rope_until(facts)]
    if isinstance(topk := facts.get("index_topk"), int):
        limits.append((topk, "does not attend to every token"))
    return min(limits, default=None)


def _same_rope_until(facts: Mapping[str, Any]) -> list[int]:
    """Keys that are kept would not stay right: the frequencies of `dynamic` and `longrope` models are others behind."""
    given = facts.get("rope_parameters") or {}
    limits = []
    for rope in given.values() if all(isinstance(value, dict) for value in given.values()) else [given]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(facts["max_position_embeddings"]))
    return limits


def prompt_lengths(facts: Mapping[str, Any], *, is_fused: bool) -> tuple[int, int, int]:
    """One of them longer than the windows of this (text) config, unless these are wide."""
    short, middle, last = FEW_TOKENS if is_fused else PROMPT_LENGTHS
    widths = [width for width in window_fields(facts).values() if width <= _WIDE]
    return short, max([middle, *(width + 3 for width in widths)]), last


def check_small_of(model: PreTrainedModel) -> None:
    """Raises WrongNumbers where the engine computes a small model of this class and config wrongly.

    A model of which transformers makes no small one passes, unless its windows are wide: nothing else looks at these.
    """
    from slime.models.small import small_model

    try:
        check_small(lambda: small_model(type(model), model.config))
    except WrongNumbers:
        raise
    except UserError as cause:
        if max(window_fields(model.config.get_text_config().to_dict()).values(), default=0) > _WIDE:
            raise
        log.info("the engine is compared with the plain forward on the model's own weights alone: %s", cause)


def check_small(make: Callable[[], PreTrainedModel]) -> None:
    """Raises WrongNumbers where the engine computes other numbers than the eager model; `make` makes one each time."""
    wrong = None
    for seed in range(_DRAWS):
        small = make()
        facts = small.config.get_text_config().to_dict()
        plain = _plain_numbers(small, facts, seed)
        table = np.zeros((len(PROMPT_LENGTHS) + 1, 2 * _WIDE), dtype=np.int32)
        with refusing(facts["model_type"]):
            runner = ModelRunner(small, table)
            runner.allocate_kv(plain.slots)
        try:
            plain.compare(runner, runner, table)
            return
        except WrongNumbers as error:
            wrong = error
    assert wrong is not None
    raise wrong


def _plain_numbers(small: PreTrainedModel, facts: Mapping[str, Any], seed: int) -> PlainNumbers:
    limit = exact_until(facts)
    try:
        return PlainNumbers(
            partial(_logits, small),
            model_type=facts["model_type"],
            vocab_size=facts["vocab_size"],
            dtype=torch.float32,
            device=torch.device("cpu"),
            context_len=sys.maxsize if limit is None else limit[0],
            lengths=prompt_lengths(facts, is_fused=False),
            seed=seed,
        )
    except Exception as cause:  # whatever a family's code raises where it is given rows of several lengths
        raise UserError(
            f"transformers cannot compute a small {small.config.model_type} model ({first_line(cause)}), so its "
            "numbers cannot be compared: choose another model"
        ) from cause


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


class PlainNumbers:
    """What a plain forward says of the prompts: `logits [B, T, V]` of tokens `[B, T]`, asked once."""

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        *,
        model_type: str,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        context_len: int,
        lengths: SequenceOf[int] = PROMPT_LENGTHS,
        seed: int = 0,
    ) -> None:
        self._model_type = model_type
        self._dtype = dtype
        lengths = [max(1, min(length, context_len - 1)) for length in lengths]
        self.slots = sum(lengths) + len(lengths)  # that `compare` writes to
        generator = np.random.default_rng(seed)
        self._tokens = [generator.integers(0, vocab_size, length + 1).tolist() for length in lengths]
        padded = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int64)
        for row, tokens in zip(padded, self._tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        with torch.inference_mode():
            found = logits(padded.to(device)).float()
        # [prompt, its end or the token after it, V]; what stands behind in a row is seen by neither
        ends = [found[i, length - 1 : length + 1] for i, length in enumerate(lengths)]
        self._log_probs = torch.stack(ends).log_softmax(-1).cpu()
        if not bool(torch.isfinite(self._log_probs).all()):
            raise UserError(
                f"this {self._model_type} model gives numbers that are not finite in {self._dtype}: choose another "
                "--dtype, or look at its weights"
            )

    def compare(self, runner: ModelRunner, decoder: Decoder, table: np.ndarray) -> None:
        """Let the engine compute the same; raises WrongNumbers where it does not."""
        batches = self.batches(len(table) - 1, runner.cuda)
        with refusing(self._model_type):
            worst = max((self._run(members, runner, decoder, table) for members in batches), key=lambda gap: gap[0])
        runner.context.window.forget()
        gap, difference = worst
        if not gap <= _TOLERANCE.get(self._dtype, _HALF_TOLERANCE):
            raise WrongNumbers(
                f"the embedded engine computes {self._model_type} models wrongly (a log-prob differs by "
                f"{difference:.2g} from its plain forward): serve it with SGLang instead"
            )

    def batches(self, most: int, cuda: bool) -> list[list[int]]:
        """Which prompts are computed together; all of them as far as there are rows, on a GPU also fewer."""
        everyone = list(range(len(self._tokens)))
        whole = [everyone[i : i + most] for i in range(0, len(everyone), most)]
        return [*whole, *(everyone[:few] for few in (2, 1) if cuda and few < len(whole[0]))]

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
