"""Default generate function, and complete answers for `/generate` requests of plugins.

Invariant: a request sends `sample.tokens`, and the ids that the engine sampled are appended with their log-probs; text
is never re-tokenized. A sample that already has part of a response is continued. A request that an engine or the gate
cut off is continued too, and its sender gets one joined answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from slime.config import Config
from slime.data.sample import Sample
from slime.data.trace import build_sglang_meta_trace_attrs
from slime.engine.http.protocol import (
    continued_params,
    continued_payload,
    extract_token_ids,
    generate_payload,
    is_single_request,
    join_responses,
    record_origin,
    routed_experts_fields,
    was_aborted,
)
from slime.rollout.gate import RequestSeeds, count_abort, current_ticket, evaluating
from slime.rollout.runtime import RolloutRuntime, state_of_engine
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


async def generate(runtime: RolloutRuntime, sample: Sample, sampling_params: JsonMapping) -> Sample:
    """Generate a response into `sample`, and return the same object.

    A request that an engine aborted (for a weight update, for example) is resumed from its tokens. If the rollout
    itself was aborted, the partial sample is returned as ABORTED. In a group with a ticket, the request waits for the
    gate before it resumes.
    """
    config, state, ticket = runtime.args, runtime.state, current_ticket()
    params = next_request_params(sampling_params)
    affinity_key = sample.session_id if sample.group_index is None else sample.group_index
    if not sample.total_length:
        sample.tokens = runtime.prompt_ids(sample)
    aborts = 0
    while True:
        # the request for the tokens that are missing
        budget = new_token_budget(config, sample, params)
        if budget == 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        left = {**continued_params(params, sample.response_length), "max_new_tokens": budget}
        if left.get("min_new_tokens"):
            left["min_new_tokens"] = min(budget, left["min_new_tokens"])
        payload = generate_payload(sample.token_array().tolist(), left)
        if config.use_rollout_routing_replay and not evaluating.get():
            experts = sample.rollout_routed_experts
            payload |= routed_experts_fields(0 if experts is None else len(experts))

        # what an engine samples
        async with nullcontext(False) if ticket is None else ticket.engine_request() as is_masked:
            version, fault_tolerant = state.weight_version, runtime.config.use_fault_tolerance
            with runtime.span(sample, "sglang_generate") as span:
                result = await runtime.pool.sample(payload, affinity_key, fault_tolerant=fault_tolerant)
                record_origin(result.meta_info, payload, version)
                if span is not None:
                    span.update(build_sglang_meta_trace_attrs(result.meta_info))
        if is_masked:
            sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
        sample.append_response_tokens(
            runtime.plugin_args,
            tokens=result.id_array,
            log_probs=result.log_prob_array,
            meta_info=result.meta_info,
            text=result.text,
        )
        if sample.status is Sample.Status.COMPLETED and config.rollout_skip_special_tokens is not False:
            # rewards see the text without the stop token, which stays in the tokens; one that the user set and that is
            # not a special token is part of the answer
            last = int(sample.token_array()[-1]) if sample.response_length else None
            is_stop = last == result.meta_info["finish_reason"].get("matched")
            is_wanted = last in (params.get("stop_token_ids") or ())
            if last is not None and (last in runtime.special_token_ids or (is_stop and not is_wanted)):
                stop_text = runtime.tokenizer.decode([last], skip_special_tokens=False)
                sample.response = sample.response.removesuffix(stop_text)

        # complete, given up, or to be continued
        if sample.status is not Sample.Status.ABORTED:
            return sample
        # a response that only this module has begun can be continued after a crash; a custom function's cannot
        is_custom = sample.generate_function_path or config.custom_generate_function_path
        if len(result.id_array) and runtime.journal is not None and not is_custom and not evaluating.get():
            await runtime.journal.record_progress(sample)
        if state.aborted:
            return sample
        aborts = count_abort(aborts, len(result.id_array), ticket)


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
        return await _complete_answer(state, payload, send)
    if path == "/abort_request" and payload.get("abort_all"):
        state.aborts_asked += 1
    return await send(payload)


async def _complete_answer(state: GenerateState, payload: JsonObject, send: Send) -> object:
    """Return the complete answer to one `/generate` request of a plugin, which may be cut off several times.

    The answer is partial, and marked as aborted, if the rollout itself was aborted, if a plugin made the engines abort
    all requests (except in an evaluation), or if the request has a `rid`, by which its sender may abort it. A cut part
    that cannot be continued is dropped and requested again.
    """
    if isinstance(params := payload.get("sampling_params"), dict):
        payload = {**payload, "sampling_params": next_request_params(params)}
    ticket, aborts_before = current_ticket(), state.aborts_asked
    so_far: JsonObject | None = None  # the parts that can be continued, joined
    sampled: list[int] = []  # its ids
    aborts = 0
    while True:
        request = payload
        if so_far is not None:
            ids = payload.get("input_ids")
            prompt_ids = list(ids) if ids is not None else state.tokenizer.encode(payload["text"])
            request = continued_payload(payload, prompt_ids, sampled)
            if not request["sampling_params"]["max_new_tokens"]:
                so_far["meta_info"]["finish_reason"] = {"type": "length", "length": len(sampled)}
                return so_far
        async with nullcontext(False) if ticket is None else ticket.engine_request() as is_masked:
            version = state.weight_version
            part = await send(request)
            for one in part if isinstance(part, list) else [part]:
                if isinstance(one, dict) and isinstance(one.get("meta_info"), dict):
                    record_origin(one["meta_info"], request, version)
        if so_far is not None:
            first, part = so_far, join_responses(so_far, part)
            reason = part["meta_info"].get("finish_reason") or {}
            is_trimmed = "matched" in reason and not (payload.get("sampling_params") or {}).get("no_stop_trim")
            if str(first.get("text", "")).endswith(INCOMPLETE_CHARACTER) and not is_trimmed:  # it was cut in its bytes
                skip = (payload.get("sampling_params") or {}).get("skip_special_tokens", True)
                text = state.tokenizer.decode(extract_token_ids(part) or [], skip_special_tokens=skip)
                part = {**part, "text": text}
        before = len(sampled)
        parts = part if isinstance(part, list) else [part]  # one per prompt
        is_cut = any(was_aborted(one) for one in parts)
        can_go_on = isinstance(part, dict) and is_single_request(payload) and "meta_info" in part
        if can_go_on and (joined_ids := extract_token_ids(part)) is not None:
            so_far, sampled = part, joined_ids
        elif is_cut and ticket is not None:
            ticket.thrown_away_tokens += sum(int(one["meta_info"].get("completion_tokens") or 0) for one in parts)
        if is_masked and before:
            part["meta_info"]["masked_until"] = before
        is_unwanted = state.aborts_asked != aborts_before and not evaluating.get()
        may_be_aborted = payload.get("rid") is not None and (ticket is None or ticket.gate.is_open)
        if not is_cut or state.aborted or is_unwanted or may_be_aborted:
            return part
        aborts = count_abort(aborts, len(sampled) - before, ticket)
