"""Conversations in the driver: multi-turn generate functions that work with messages, never with tokens.

    async with converse(args, sample, sampling_params, tools=SCHEMAS) as talk:
        reply = await talk.ask([Message("user", sample.prompt)])
        while reply.tool_calls:
            reply = await talk.ask([Message("tool", run(call), tool_call_id=call.id) for call in reply.tool_calls])
        return talk.finish(reward=1.0)

Requests go through the driver's gate: partial rollouts, weight updates and fault tolerance work as for `generate`.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from slime.agent.messages import Message, TurnRequest
from slime.agent.session.limits import Limits
from slime.agent.session.session import Session
from slime.agent.session.template import ChatModel
from slime.agent.session.tree import Turn
from slime.agent.session.turn import EngineSampler, take_turn
from slime.config import Config
from slime.data.chat_template import model_context_length
from slime.data.sample import Reward, Sample
from slime.models.parsers.events import Event
from slime.models.parsers.formats import formats_from_flags
from slime.rollout.gate import current_ticket, evaluating
from slime.rollout.generate import next_request_params
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.storage.json_types import JsonMapping, JsonObject

OnEvent = Callable[[Event], Awaitable[None]]


class Conversation:
    """One session, continued turn by turn; `messages` are all messages so far."""

    def __init__(
        self,
        session: Session,
        sampler: EngineSampler,
        model: ChatModel,
        params: JsonMapping,
        *,
        base: Sample,
        args: argparse.Namespace,
        tools: Sequence[JsonMapping] = (),
    ) -> None:
        self.session = session
        self.messages: list[Message] = []
        self.tools = tuple(tools)
        self._sampler, self._model, self._params = sampler, model, params
        self._base, self._args = base, args
        self._last: Turn | None = None

    async def ask(
        self, new: Iterable[Message] = (), *, max_tokens: int | None = None, on_event: OnEvent | None = None
    ) -> Message:
        """Append the messages `new` and sample the model's reply; raises when a limit of the session is reached.

        `on_event` is called with each event of the reply as it is sampled.
        """

        async def on_events(events: list[Event]) -> None:
            assert on_event is not None
            for event in events:
                await on_event(event)

        self.messages += new
        request = TurnRequest(tuple(self.messages), self.tools, max_tokens=max_tokens)
        prompt = self.session.prepare(request)
        hears = None if on_event is None else on_events
        taken = await take_turn(self.session, request, prompt, self._sampler, self._model, self._params, hears)
        self._last = taken.turn
        self.messages.append(taken.turn.message)
        return taken.turn.message

    @property
    def last_turn(self) -> Turn:
        """The turn of the last reply, with its id for rewards, its finish reason and its tokens."""
        if self._last is None:
            raise LookupError("the conversation has no turn yet: call ask first")
        return self._last

    def finish(self, reward: Reward | None = None, metadata: JsonMapping | None = None) -> list[Sample]:
        """Close the session and return the conversation as samples."""
        self.session.close()
        return self.session.samples(self._base, reward, metadata, args=self._args)


@asynccontextmanager
async def converse(
    args: argparse.Namespace,
    sample: Sample,
    sampling_params: JsonMapping,
    *,
    tools: Sequence[JsonMapping] = (),
    max_turns: int | None = None,
) -> AsyncIterator[Conversation]:
    """Open a conversation for `sample`, under the run's limits (`--max-turns`, `--session-max-tokens`)."""
    runtime = runtime_for(args)
    model = chat_model(runtime)
    template = model.template(template_kwargs(runtime.args, sample))
    limits = session_limits(runtime.args, sampling_params, model.context, max_turns)
    session = Session(secrets.token_urlsafe(24), template, limits=limits, strict=runtime.args.strict_tokens)
    sampler = EngineSampler(
        runtime.pool,
        fault_tolerant=runtime.config.use_fault_tolerance,
        ticket=current_ticket(),  # requests wait at the gate if the group holds one
        given_up=lambda: runtime.state.aborted,
        version=lambda: runtime.state.weight_version,
        draws=next_request_params,
        routing=runtime.args.use_rollout_routing_replay and not evaluating.get(),
    )
    talk = Conversation(session, sampler, model, sampling_params, base=sample, args=runtime.plugin_args, tools=tools)
    try:
        yield talk
    finally:
        session.close()


def chat_model(runtime: RolloutRuntime) -> ChatModel:
    """Return the trained model's tokenizer, chat template and formats, read once per run."""

    def read() -> ChatModel:
        folder = runtime.args.hf_checkpoint
        context = None if folder is None else model_context_length(folder)
        return ChatModel(runtime.tokenizer, context=context, formats=formats_from_flags(runtime.args.carried))

    return runtime.owned("chat model", read)


def template_kwargs(config: Config, sample: Sample) -> JsonObject:
    """Return the keyword arguments for the chat template of a sample."""
    return {**(config.apply_chat_template_kwargs or {}), **sample.apply_chat_template_kwargs}


def session_limits(config: Config, params: JsonMapping, context: int | None, max_turns: int | None) -> Limits:
    """Return the limits of a session of this run."""
    asked = config.rollout_max_context_len
    if evaluating.get() and config.eval_max_context_len is not None:
        asked = config.eval_max_context_len
    known = [bound for bound in (asked, context) if bound is not None]
    return Limits(
        max_turns=config.max_turns if max_turns is None else max_turns,
        max_tokens=config.session_max_tokens,
        max_new_tokens=params.get("max_new_tokens"),
        max_context=min(known, default=None),
    )
