"""The default generate: one sample, one engine call (more only to resume), exact in its tokens.

Invariant: what is sent is `sample.tokens`, what is appended are the ids the engine says it sampled, with their
log-probs; text is never tokenised again. A sample that already holds part of a response is continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import Any

from slime.config import Config
from slime.data.sample import Sample
from slime.engine.http.client import EngineError, GenerateResult
from slime.engine.http.protocol import continued_params, generate_payload, note_first_version
from slime.rollout.gate import MOST_RESUMES, AbortedTooOften, Ticket, evaluating, ticket_here
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.rollout.tokenization import prompt_token_ids

TRANSIENT_RETRIES = 3
FIRST_BACKOFF_S = 0.5
FAULTY_RETRIES = 8
MOST_BACKOFF_S = 10.0


class PromptTooLong(Exception):
    """The prompt leaves no room for a response."""


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Fill `sample` with a response; returns the same object.

    A request aborted by the engine (a weight update, say) is resumed from its tokens, unless the rollout itself was
    aborted: then the partial sample is returned as ABORTED. Inside a group that waits at the gate it is resumed there.
    """
    runtime = runtime_for(args)
    ticket = ticket_here()
    if not sample.tokens:
        sample.tokens = prompt_token_ids(runtime.tokenizer, sample)
    aborts = 0
    while aborts < MOST_RESUMES:
        budget = new_token_budget(args, sample, sampling_params)
        if budget == 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        result = await _engine_result(runtime, ticket, sample, sampling_params, budget)
        sample.append_response_tokens(
            args, tokens=result.token_ids, log_probs=result.log_probs, meta_info=result.meta_info, text=result.text
        )
        if sample.status is not Sample.Status.ABORTED:
            _leave_out_stop_token(runtime, sample, result.meta_info["finish_reason"].get("matched"))
            return sample
        if result.token_ids:
            _record_progress(runtime, sample)
        if runtime.state.aborted:
            return sample
        if ticket is None or ticket.gate.is_open:
            aborts += 1
    raise AbortedTooOften(f"the engine aborted this request {MOST_RESUMES} times")


def _leave_out_stop_token(runtime: RolloutRuntime, sample: Sample, matched: Any) -> None:
    """The text that rewards see ends where the answer does; the token that ended it stays among the tokens.

    A token that the user stops at (`--rollout-stop-token-ids`) and that is no special one is part of the answer.
    """
    if sample.status is not Sample.Status.COMPLETED or runtime.args.rollout_skip_special_tokens is False:
        return
    if not sample.response_length:
        return
    last, wanted = sample.tokens[-1], runtime.args.rollout_stop_token_ids or ()
    if last in runtime.special_token_ids or (last == matched and last not in wanted):
        sample.response = sample.response.removesuffix(runtime.tokenizer.decode([last], skip_special_tokens=False))


def new_token_budget(args: Config, sample: Sample, sampling_params: Mapping[str, Any]) -> int:
    """How many more tokens `sample` may get, by the response limit and the context; 0 when it is full."""
    context = args.rollout_max_context_len
    prompt_length = len(sample.tokens) - sample.response_length
    if context is not None and prompt_length >= context:
        raise PromptTooLong(f"the prompt has {prompt_length} tokens, the context (rollout_max_context_len) {context}")
    budget = sampling_params["max_new_tokens"] - sample.response_length
    if context is not None:
        budget = min(budget, context - len(sample.tokens))
    return max(0, budget)


async def _engine_result(
    runtime: RolloutRuntime, ticket: Ticket | None, sample: Sample, sampling_params: Mapping[str, Any], budget: int
) -> GenerateResult:
    """What an engine samples now or, for a group that waits at the gate, when it opens."""
    if ticket is None:
        return await _call_engine(runtime, sample, sampling_params, budget)
    async with ticket.engine_request() as was_held:
        if was_held and ticket.masks:
            sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
        return await _call_engine(runtime, sample, sampling_params, budget)


def _record_progress(runtime: RolloutRuntime, sample: Sample) -> None:
    """A response that only this module has begun can be continued after a crash; a custom function's cannot."""
    is_custom = sample.generate_function_path or runtime.args.custom_generate_function_path
    if runtime.journal is not None and not is_custom and not evaluating.get():
        runtime.journal.progressed(sample)


async def _call_engine(
    runtime: RolloutRuntime, sample: Sample, sampling_params: Mapping[str, Any], budget: int
) -> GenerateResult:
    params = {**continued_params(sampling_params, sample.response_length), "max_new_tokens": budget}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(budget, params["min_new_tokens"])
    payload = generate_payload(sample.tokens, params)
    affinity_key = sample.session_id if sample.group_index is None else sample.group_index
    version = runtime.state.weight_version
    result = await _answer(runtime, payload, affinity_key)
    note_first_version(result.meta_info, version)
    return result


async def _answer(runtime: RolloutRuntime, payload: dict[str, Any], affinity_key: Hashable | None) -> GenerateResult:
    if runtime.config.use_fault_tolerance:
        return await _keep_calling(runtime, payload, affinity_key)
    for attempt in range(TRANSIENT_RETRIES):
        try:
            return await runtime.pool.generate_result(payload, affinity_key)
        except EngineError as error:
            if not error.transient:
                raise
        await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
    return await runtime.pool.generate_result(payload, affinity_key)


async def _keep_calling(
    runtime: RolloutRuntime, payload: dict[str, Any], affinity_key: Hashable | None
) -> GenerateResult:
    """What an engine sampled, perhaps not to the end: a broken answer counts as aborted and is continued elsewhere."""
    error: EngineError | None = None
    for attempt in range(FAULTY_RETRIES):
        if attempt:
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2**attempt, MOST_BACKOFF_S))
        try:
            result, error = await runtime.pool.generate_kept(payload, affinity_key)
        except EngineError as raised:
            if not raised.transient:
                raise
            result, error = None, raised
        if result is not None and (error is None or result.token_ids):
            return result
    assert error is not None
    raise error
