"""Other forms that a user's function may have, turned into the one that the rollout calls.

Invariant: what comes out is called like the function of the flag's contract, whatever went in: a generate function of
`(args, samples)` becomes one of `(args, sample, sampling_params)`, a class with `compute_reward(prompts, responses)`
becomes a function of `(args, samples)` around the one object made of it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slime.config.plugins import constructor_values, is_async, takes_samples
from slime.data.chat_template import encode, prompt_token_ids
from slime.data.sample import Sample


def as_generate(function: Callable[..., Any], tokenizer: Callable[[], Any]) -> Callable[..., Any]:
    """A generate function of one sample. `tokenizer()` is asked only for samples that come back without tokens."""
    if not takes_samples(function):
        return function
    made = ListGenerate(function, tokenizer)
    return made.awaited if is_async(function) else made


class ListGenerate:
    """A generate function of `(args, samples)`, called with one sample at a time.

    It returns the samples, or nothing when it has only changed the one it was given. Sampling parameters and
    `evaluation` are given to it by name if it has them.
    """

    def __init__(self, function: Callable[..., Any], tokenizer: Callable[[], Any]) -> None:
        self._function = function
        self._tokenizer = tokenizer
        self._named = set(inspect.signature(function).parameters)

    def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        result = self._call(args, sample, sampling_params, evaluation)
        return self._awaited(result, sample) if inspect.isawaitable(result) else self._made(result, sample)

    async def awaited(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        """The same, of an async function."""
        return await self._awaited(self._call(args, sample, sampling_params, evaluation), sample)

    def _call(self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
        offered = {"sampling_params": sampling_params, "evaluation": evaluation}
        return self._function(args, [sample], **{k: v for k, v in offered.items() if k in self._named})

    async def _awaited(self, result: Awaitable[Any], sample: Sample) -> Any:
        return self._made(await result, sample)

    def _made(self, result: Any, sample: Sample) -> Any:
        if result is None:
            result = [sample]
        if not isinstance(result, list) or not all(isinstance(item, Sample) for item in result):
            return result  # the caller says what is wrong with it
        for item in result:
            add_missing_tokens(item, self._tokenizer)
        return result[0] if len(result) == 1 else result


def add_missing_tokens(sample: Sample, tokenizer: Callable[[], Any]) -> None:
    """Tokens of a sample whose generate function wrote only its text: the response, encoded, after the prompt.

    Such a sample has no log-probs; training computes them. One that carries tokens is left alone.
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
    """A reward function; a class is made into an object here, once."""
    if not isinstance(found, type):
        return found
    return ComputeReward(found(**constructor_values(found, flags, args, what)).compute_reward)


class ComputeReward:
    """`compute_reward(prompts, responses)` as a function of samples; `labels` and `samples` are given if it has them.

    Plain methods are called one at a time, as the object they belong to may hold a model.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._named = set(inspect.signature(method).parameters)
        self._lock = threading.Lock()

    def __call__(self, args: Any, samples: Sequence[Sample]) -> Any:
        prompts = [sample.prompt for sample in samples]
        responses = [sample.response for sample in samples]
        offered = {"labels": [sample.label for sample in samples], "samples": list(samples)}
        with self._lock:
            return self._method(prompts, responses, **{k: v for k, v in offered.items() if k in self._named})
