"""Adapts other signatures of user functions to those that the rollout calls.

Invariant: an adapted function has the signature of the flag's contract. A generate function of `(args, samples)`
becomes one of `(args, sample, sampling_params)`. A class with `compute_reward(prompts, responses)` is instantiated once
and becomes a function of `(args, samples)`.
"""

from __future__ import annotations

import argparse
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.plugins import constructor_values, is_async, takes_samples
from slime.data.chat_template import encode, prompt_token_ids
from slime.data.sample import Sample
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    GetTokenizer = Callable[[], PreTrainedTokenizerBase]


def as_generate(function: Callable[..., object], tokenizer: GetTokenizer) -> Callable[..., object]:
    """Return a generate function of one sample.

    `tokenizer()` is called only if a sample comes back without tokens.
    """
    if not takes_samples(function):
        return function
    made = ListGenerate(function, tokenizer)
    return made.awaited if is_async(function) else made


class ListGenerate:
    """Calls a generate function of `(args, samples)` with one sample at a time.

    The function returns the samples, or None if it only changed the given one. It gets `sampling_params` and
    `evaluation` by name if it has these parameters.
    """

    def __init__(self, function: Callable[..., object], tokenizer: GetTokenizer) -> None:
        self._function = function
        self._tokenizer = tokenizer
        self._named = set(inspect.signature(function).parameters)

    def __call__(
        self, args: argparse.Namespace, sample: Sample, sampling_params: JsonObject, evaluation: bool = False
    ) -> object:
        result = self._call(args, sample, sampling_params, evaluation)
        return self._awaited(result, sample) if inspect.isawaitable(result) else self._made(result, sample)

    async def awaited(
        self, args: argparse.Namespace, sample: Sample, sampling_params: JsonObject, evaluation: bool = False
    ) -> object:
        """Call an async function with one sample."""
        return await self._awaited(self._call(args, sample, sampling_params, evaluation), sample)

    def _call(self, args: argparse.Namespace, sample: Sample, sampling_params: JsonObject, evaluation: bool) -> Any:
        offered = {"sampling_params": sampling_params, "evaluation": evaluation}
        return self._function(args, [sample], **{k: v for k, v in offered.items() if k in self._named})

    async def _awaited(self, result: Awaitable[object], sample: Sample) -> object:
        return self._made(await result, sample)

    def _made(self, result: object, sample: Sample) -> object:
        if result is None:
            result = [sample]
        if not isinstance(result, list) or not all(isinstance(item, Sample) for item in result):
            return result  # the caller raises the error
        for item in result:
            add_missing_tokens(item, self._tokenizer)
        return result[0] if len(result) == 1 else result


def add_missing_tokens(sample: Sample, tokenizer: GetTokenizer) -> None:
    """Set the tokens of a sample whose generate function wrote only text: the prompt, then the encoded response.

    Such a sample has no log-probs; training computes them. A sample with response tokens is not changed.
    """
    if sample.response_length or not sample.response:
        return
    response_ids = encode(tokenizer(), sample.response)
    sample.tokens = prompt_token_ids(tokenizer(), sample) + response_ids
    sample.response_length = len(response_ids)
    sample.loss_mask = [1] * len(response_ids)
    sample.rollout_log_probs = None
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED


def as_reward(found: Callable[..., Any], flags: Any, args: Any, what: str) -> Callable[..., Any]:
    """Return a reward function; a class is instantiated here, once."""
    if not isinstance(found, type):
        return found
    return ComputeReward(found(**constructor_values(found, flags, args, what)).compute_reward)


class ComputeReward:
    """Calls `compute_reward(prompts, responses)` on samples; passes `labels` and `samples` if it has these parameters.

    Plain methods run one at a time, because the object of the method may hold a model.
    """

    def __init__(self, method: Callable[..., object]) -> None:
        self._method = method
        self._named = set(inspect.signature(method).parameters)
        self._lock = threading.Lock()

    def __call__(self, args: argparse.Namespace, samples: Sequence[Sample]) -> object:
        prompts = [sample.prompt for sample in samples]
        responses = [sample.response for sample in samples]
        offered = {"labels": [sample.label for sample in samples], "samples": list(samples)}
        with self._lock:
            return self._method(prompts, responses, **{k: v for k, v in offered.items() if k in self._named})
