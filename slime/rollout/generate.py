"""Default generate function, and complete answers for `/generate` requests of plugins.

Invariant: a request sends `sample.tokens`, and the ids that the engine sampled are appended with their log-probs; text
is never re-tokenized. A sample that already has part of a response is continued. A request that an engine or the gate
cut off is continued too, and its sender gets one joined answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from slime.config import Config
from slime.data.sample import Sample
from slime.data.trace import build_sglang_meta_trace_attrs
from slime.engine.http.client import GenerateResult
from slime.engine.http.protocol import (
    continued_params,
    continued_payload,
    extract_token_ids,
    generate_payload,
    is_single_request,
    join_responses,
    record_first_routed,
    record_first_version,
    routed_experts_fields,
    was_aborted,
)
from slime.rollout.gate import Ticket, current_ticket, evaluating
from slime.rollout.retry import MAX_RESUMES, AbortedTooOften, RequestSeeds, request_completion
from slime.rollout.runtime import RolloutRuntime, runtime_for, state_of_engine
from slime.rollout.state import GenerateState
from slime.storage.json_types import JsonMapping, JsonObject

Send = Callable[[Any], Awaitable[Any]]
"""Sends the body of a request and returns the parsed answer."""

INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"

_draws: ContextVar[RequestSeeds | None] = ContextVar("draws", default=None)


class PromptFillsContext(Exception):
    """The prompt leaves no room for a response."""


def set_sample_seed(seed: int) -> None:
    """Set the seed of the sample that the current task, and the tasks it starts, generate."""
    _draws.set(RequestSeeds(seed))


def next_request_params(params: JsonMapping) -> JsonObject:
    """Return the parameters of the next request; the seed of the sample is replaced by a new one for each request.

    Thus the turns of a conversation, and concurrent agents, do not sample with the same random numbers. A seed that
    the caller chose is not changed.
    """
    draws = _draws.get()
    return dict(params) if draws is None else draws.apart(params)


async def generate(args: Config, sample: Sample, sampling_params: JsonObject) -> Sample:
    """Generate a response into `sample`, and return the same object.

    A request that an engine aborted (for a weight update, for example) is resumed from its tokens. If the rollout
    itself was aborted, the partial sample is returned as ABORTED. In a group with a ticket, the request waits for the
    gate before it resumes.
    """
    runtime = runtime_for(args)
    config, ticket = runtime.args, current_ticket()
    sampling_params = next_request_params(sampling_params)
    if not sample.total_length:
        sample.tokens = runtime.prompt_ids(sample)
    aborts = 0
    while aborts < MAX_RESUMES:
        budget = new_token_budget(config, sample, sampling_params)
        if budget == 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        with runtime.span(sample, "sglang_generate") as span:
            result = await _engine_result(runtime, ticket, sample, sampling_params, budget)
            if span is not None:
                span.update(build_sglang_meta_trace_attrs(result.meta_info))
        sample.append_response_tokens(
            runtime.plugin_args,
            tokens=result.id_array,
            log_probs=result.log_prob_array,
            meta_info=result.meta_info,
            text=result.text,
        )
        if sample.status is not Sample.Status.ABORTED:
            wanted = sampling_params.get("stop_token_ids") or ()
            _leave_out_stop_token(runtime, sample, result.meta_info["finish_reason"].get("matched"), wanted)
            return sample
        if len(result.id_array):
            # a response that only this module has begun can be continued after a crash; a custom function's cannot
            is_custom = sample.generate_function_path or runtime.args.custom_generate_function_path
            if runtime.journal is not None and not is_custom and not evaluating.get():
                await runtime.journal.record_progress(sample)
        if runtime.state.aborted:
            return sample
        if ticket is None or ticket.gate.is_open:
            aborts = 0 if len(result.id_array) else aborts + 1
    raise AbortedTooOften.by_engine()


def _leave_out_stop_token(runtime: RolloutRuntime, sample: Sample, matched: object, wanted: Sequence[int]) -> None:
    """Remove the stop token from the response text that rewards see; it stays in the tokens.

    A stop token that the user set (`wanted`) and that is not a special token is part of the answer.
    """
    if sample.status is not Sample.Status.COMPLETED or runtime.args.rollout_skip_special_tokens is False:
        return
    if not sample.response_length:
        return
    last = int(sample.token_array()[-1])
    if last in runtime.special_token_ids or (last == matched and last not in wanted):
        sample.response = sample.response.removesuffix(runtime.tokenizer.decode([last], skip_special_tokens=False))


def new_token_budget(args: Config, sample: Sample, sampling_params: JsonMapping) -> int:
    """Return how many tokens `sample` may still get within the response limit and the context; 0 if it is full."""
    flag, context = "rollout_max_context_len", args.rollout_max_context_len
    if evaluating.get() and args.eval_max_context_len is not None:
        flag, context = "eval_max_context_len", args.eval_max_context_len
    prompt_length = sample.prompt_length
    if context is not None and prompt_length >= context:
        raise PromptFillsContext(f"the prompt has {prompt_length} tokens, the context ({flag}) {context}")
    budget = sampling_params["max_new_tokens"] - sample.response_length
    if context is not None:
        budget = min(budget, context - sample.total_length)
    return max(0, budget)


async def _engine_result(
    runtime: RolloutRuntime, ticket: Ticket | None, sample: Sample, sampling_params: JsonMapping, budget: int
) -> GenerateResult:
    """Sample with an engine; a group with a ticket waits for the gate first."""
    if ticket is None:
        return await _call_engine(runtime, sample, sampling_params, budget)
    async with ticket.engine_request() as was_held:
        if was_held and ticket.masks:
            sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
        return await _call_engine(runtime, sample, sampling_params, budget)


async def _call_engine(
    runtime: RolloutRuntime, sample: Sample, sampling_params: JsonMapping, budget: int
) -> GenerateResult:
    params = {**continued_params(sampling_params, sample.response_length), "max_new_tokens": budget}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(budget, params["min_new_tokens"])
    payload = generate_payload(sample.token_array().tolist(), params)
    known = 0 if sample.rollout_routed_experts is None else len(sample.rollout_routed_experts)
    if runtime.args.use_rollout_routing_replay and not evaluating.get():
        payload |= routed_experts_fields(known)
    affinity_key = sample.session_id if sample.group_index is None else sample.group_index
    version = runtime.state.weight_version
    result = await request_completion(
        runtime.pool, payload, affinity_key, fault_tolerant=runtime.config.use_fault_tolerance
    )
    record_first_version(result.meta_info, version)
    record_first_routed(result.meta_info, payload)
    return result


def get_model_url(args: argparse.Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of a named model's router (``args.sglang_model_routers``), else of the default router."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{host}:{port}{endpoint}"


async def answer_to(url: str, payload: object, send: Send) -> object:
    """Send a plugin's POST to `url` and return the answer; `/generate` of this run's engines returns complete answers.

    If a plugin makes such an engine abort all requests, its requests are not resumed: the answers are partial.
    """
    state = state_of_engine(url)
    if state is None or not isinstance(payload, dict):
        return await send(payload)
    path = urlsplit(url).path.rstrip("/")
    if path == "/generate":
        return await ResumedRequest(state, payload).get(send)
    if path == "/abort_request" and payload.get("abort_all"):
        state.aborts_asked += 1
    return await send(payload)


class ResumedRequest:
    """Collects the complete answer to one `/generate` request, which may be cut off several times."""

    def __init__(self, state: GenerateState, payload: JsonMapping) -> None:
        self._state = state
        self._payload = payload
        if isinstance(params := payload.get("sampling_params"), dict):
            self._payload = {**payload, "sampling_params": next_request_params(params)}
        self._ticket = current_ticket()
        self._aborts_before = state.aborts_asked
        self._so_far: JsonObject | None = None

    async def get(self, send: Send) -> object:
        """Send the request, and its remainder whenever it was aborted.

        The answer is partial, and marked as aborted, if the rollout itself was aborted, if a plugin made the engines
        abort all requests (except in an evaluation), or if the request has a `rid`, by which its sender may abort it.
        """
        aborts = 0
        while True:
            before = len(self._sampled())
            answer = await self._next_part(send)
            if not _is_cut(answer) or self._state.aborted:
                return answer
            if self._state.aborts_asked != self._aborts_before and not evaluating.get():
                return answer
            if self._ticket is None or self._ticket.gate.is_open:
                if self._payload.get("rid") is not None:
                    return answer
                aborts = 0 if len(self._sampled()) > before else aborts + 1
                if aborts == MAX_RESUMES:
                    raise AbortedTooOften.by_engine()

    async def _next_part(self, send: Send) -> object:
        """Send one more request and return the answer so far."""
        sampled = self._sampled()
        request: JsonMapping = self._payload
        if self._so_far is not None:
            ids = self._payload.get("input_ids")
            prompt_ids = list(ids) if ids is not None else self._state.tokenizer.encode(self._payload["text"])
            request = continued_payload(self._payload, prompt_ids, sampled)
            if not request["sampling_params"]["max_new_tokens"]:
                self._so_far["meta_info"]["finish_reason"] = {"type": "length", "length": len(sampled)}
                return self._so_far
        if self._ticket is None:
            return self._with(await self._sent(send, request))
        async with self._ticket.engine_request() as was_held:
            part = await self._sent(send, request)
        answer = self._with(part)
        if was_held and sampled and self._ticket.masks:
            answer["meta_info"]["masked_until"] = len(sampled)
        return answer

    async def _sent(self, send: Send, request: JsonMapping) -> object:
        version = self._state.weight_version
        answer = await send(request)
        for one in _each(answer):
            if isinstance(one, dict) and isinstance(one.get("meta_info"), dict):
                record_first_version(one["meta_info"], version)
                record_first_routed(one["meta_info"], request)
        return answer

    def _with(self, part: Any) -> Any:
        """Join the parts so far with this one; a cut part that cannot be continued is dropped and requested again.

        The joined text is decoded again if the cut split the bytes of a character, unless its stop word was trimmed.
        """
        if self._so_far is not None:
            first, tokenizer = self._so_far, self._state.tokenizer
            part = join_responses(first, part)
            params = self._payload.get("sampling_params") or {}
            reason = part["meta_info"].get("finish_reason") or {}
            is_trimmed = "matched" in reason and not params.get("no_stop_trim")
            if str(first.get("text", "")).endswith(INCOMPLETE_CHARACTER) and not is_trimmed:
                skip = params.get("skip_special_tokens", True)
                text = tokenizer.decode(extract_token_ids(part) or [], skip_special_tokens=skip)
                part = {**part, "text": text}
        can_go_on = isinstance(part, dict) and is_single_request(self._payload) and "meta_info" in part
        if can_go_on and extract_token_ids(part) is not None:
            self._so_far = part
        elif _is_cut(part) and self._ticket is not None:
            self._ticket.thrown_away_tokens += sum(
                int(one["meta_info"].get("completion_tokens") or 0) for one in _each(part)
            )
        return part

    def _sampled(self) -> list[int]:
        return [] if self._so_far is None else extract_token_ids(self._so_far) or []


def _each(answer: Any) -> list[Any]:
    """Return the answers to all prompts of a request as a list."""
    return answer if isinstance(answer, list) else [answer]


def _is_cut(answer: object) -> bool:
    return any(was_aborted(one) for one in _each(answer))
