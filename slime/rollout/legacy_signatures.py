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

    A function of `(args, samples)` is called with one sample at a time. It returns the samples, or None if it only
    changed the given one, and gets `sampling_params` and `evaluation` by name if it has these parameters.
    `tokenizer()` is called only if a sample comes back without tokens.
    """
    if not takes_samples(function):
        return function
    named = set(inspect.signature(function).parameters)

    def call(args: object, sample: Sample, sampling_params: JsonObject, evaluation: bool) -> Any:
        offered = {"sampling_params": sampling_params, "evaluation": evaluation}
        return function(args, [sample], **{k: v for k, v in offered.items() if k in named})

    def made(result: object, sample: Sample) -> object:
        if result is None:
            result = [sample]
        if not isinstance(result, list) or not all(isinstance(item, Sample) for item in result):
            return result  # the caller raises the error
        for item in result:
            add_missing_tokens(item, tokenizer)
        return result[0] if len(result) == 1 else result

    async def made_later(result: Awaitable[object], sample: Sample) -> object:
        return made(await result, sample)

    async def call_async(
        args: argparse.Namespace, sample: Sample, sampling_params: JsonObject, evaluation: bool = False
    ) -> object:
        return made(await call(args, sample, sampling_params, evaluation), sample)

    def call_plain(
        args: argparse.Namespace, sample: Sample, sampling_params: JsonObject, evaluation: bool = False
    ) -> object:
        result = call(args, sample, sampling_params, evaluation)
        return made_later(result, sample) if inspect.isawaitable(result) else made(result, sample)

    return call_async if is_async(function) else call_plain


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
    """Return a reward function; a class is instantiated here, once.

    Its `compute_reward(prompts, responses)` gets `labels` and `samples` if it has these parameters. Calls run one at a
    time, because the object may hold a model.
    """
    if not isinstance(found, type):
        return found
    method = found(**constructor_values(found, flags, args, what)).compute_reward
    named, lock = set(inspect.signature(method).parameters), threading.Lock()

    def compute(args: argparse.Namespace, samples: Sequence[Sample]) -> object:
        prompts = [sample.prompt for sample in samples]
        responses = [sample.response for sample in samples]
        offered = {"labels": [sample.label for sample in samples], "samples": list(samples)}
        with lock:
            return method(prompts, responses, **{k: v for k, v in offered.items() if k in named})

    return compute
