"""Sessions for agent programs that use HTTP endpoints, opened by a generate function:

    async with open_session(args, sample, sampling_params) as session:
        await run_my_agent(base_url=session.openai_url, api_key=session.key)
        return await session.finish(reward=1.0)

The first session of a run starts the agent server process (`slime.agent.server`). With `--partial-rollout` sessions
wait at the gate like requests of the driver. When a rollout is given up, its sessions end: the block raises `GivenUp`,
and the sample starts over. When the agent server dies, its sessions fail with `AgentServerFailed`.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace

from slime.agent.conversation import session_limits, template_kwargs
from slime.agent.messages import Message
from slime.agent.server.control import AgentServerFailed
from slime.agent.server.dialects import Kind
from slime.agent.server.settings import Opening
from slime.agent.server.supervisor import AgentServer, RunningServer
from slime.agent.session.records import message_of
from slime.agent.session.session import Session
from slime.agent.session.turn_journal import Attempt
from slime.data.chat_template import model_context_length
from slime.data.sample import Reward, Sample
from slime.errors import UserError
from slime.rollout.gate import Gate, Ticket, current_ticket, evaluating
from slime.rollout.outcomes import GivenUp
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.storage.json_types import JsonMapping, JsonObject

KEY_BYTES = 24


class NoTurns(Exception):
    """A session was finished without a single turn of the model."""


class AgentSession:
    """One attempt at one task, as the generate function sees it while an agent program works on it.

    `url` is the address of the endpoints, `openai_url` and `anthropic_url` are the base URLs for these clients, `key`
    is their API key, and `model` the model name to request. `unix_socket` serves the same API to sandboxes without a
    network, and `public_url` to sandboxes on other machines (`--agent-public-url`).
    """

    def __init__(
        self, runtime: RolloutRuntime, server: RunningServer, key: str, base: Sample, *, resumed_turns: int = 0
    ) -> None:
        self.key = key
        self.resumed_turns = resumed_turns
        self.model = server.remote.model
        self.url = server.remote.url
        self.openai_url, self.anthropic_url = f"{self.url}/v1", self.url
        self.public_url = (runtime.args.agent_public_url or self.url).rstrip("/")
        self.unix_socket = server.remote.agents_socket
        self._args, self._base, self._server = runtime.plugin_args, base, server
        self._rewards: list[tuple[str, float]] = []
        self.is_over = False
        self.given_up = False

    async def turns(self) -> list[Message]:
        """Return the messages up to the last turn; the `reference` of an assistant message is the id of its turn."""
        self._check()
        said = await self._server.remote.call("turns", key=self.key)
        return [message_of(record) for record in said["messages"]]

    def reward(self, turn_id: str, value: float) -> None:
        """Add a reward to one turn; several rewards for a turn add up."""
        self._rewards.append((turn_id, value))

    async def accept_on(self, listener: socket.socket) -> None:
        """Make the endpoints accept connections on a listening socket too, such as one opened inside a sandbox."""
        self._check()
        await self._server.remote.accept_on(self.key, listener)

    async def finish(self, reward: Reward | None = None, metadata: JsonMapping | None = None) -> list[Sample]:
        """End the session, disconnect its clients, and return the sampled turns as samples."""
        self._check()
        self.is_over = True
        collected = await self._close(Kind.CLOSED, "this session has been finished", collect=True)
        self._server.warn(collected["warning"])
        session = await asyncio.to_thread(Session.from_record, collected["record"])
        for turn_id, value in self._rewards:
            session.reward(turn_id, value)
        samples = session.samples(self._base, reward, metadata, args=self._args)
        if not samples:
            why = collected["failure"] or "its client sent no request, or every request was refused"
            raise NoTurns(f"the session has no turn: {why}")
        return samples

    async def drop(self, kind: Kind, message: str) -> None:
        """End the session and discard its turns; does nothing if the session has ended."""
        if self.is_over or self.given_up or self._server.died.is_set():
            return
        self.is_over = True
        with suppress(AgentServerFailed):  # the session ends with the server
            await self._close(kind, message)

    def failure(self) -> Exception | None:
        """Return the error that ended the session from outside, if any."""
        if self.given_up:
            return GivenUp("the rollout has all samples that it needs: this session was given up")
        return self._server.failure() if self._server.died.is_set() else None

    async def give_up(self) -> None:
        """End the session, because the rollout has all samples that it needs."""
        self.given_up = True
        with suppress(AgentServerFailed):
            await self._close(Kind.CLOSED, "the rollout has all samples that it needs")

    async def _close(self, kind: Kind, message: str, *, collect: bool = False) -> JsonObject:
        answer: JsonObject = await self._server.remote.call(
            "close", key=self.key, kind=str(kind), message=message, collect=collect
        )
        return answer

    def _check(self) -> None:
        if (failure := self.failure()) is not None:
            raise failure
        if self.is_over:
            raise RuntimeError("this session has been finished")


@asynccontextmanager
async def open_session(
    args: argparse.Namespace,
    sample: Sample,
    sampling_params: JsonMapping,
    *,
    max_turns: int | None = None,
    models: Sequence[str] = (),
    resume: bool = False,
) -> AsyncIterator[AgentSession]:
    """Open a session for `sample`, under the run's limits (`--max-turns`, `--session-max-tokens`).

    `models` are names that its client may use for the model, in addition to the default ones. With `resume` the session
    continues from the turns of an attempt that a crash of the run interrupted (`AgentSession.resumed_turns`), for
    agents whose environment survived the crash. Leaving the block without `finish` drops the session.
    """
    runtime, ticket = runtime_for(args), current_ticket()
    endpoints = agent_server(runtime)
    config = runtime.args
    assert config.hf_checkpoint is not None, "a run with engines has a model"
    opening = Opening(
        key=secrets.token_urlsafe(KEY_BYTES),
        params=dict(sampling_params),
        limits=session_limits(config, sampling_params, model_context_length(config.hf_checkpoint), max_turns).to_dict(),
        strict=config.strict_tokens,
        template_kwargs=template_kwargs(config, sample),
        held=ticket is not None,
        masks=ticket is not None and ticket.masks,
        names=tuple(models),
        routing=config.use_rollout_routing_replay and not evaluating.get(),
    )
    if endpoints.journal is not None and not evaluating.get():
        attempt = Attempt.of(endpoints.run, sample)
        opening = replace(opening, attempt=asdict(attempt))
        if resume and (earlier := await asyncio.to_thread(endpoints.journal.restore, attempt)) is not None:
            opening = replace(opening, key=earlier.key, record=earlier.to_record())
    server = await endpoints.running(opening.key)
    opened = await server.remote.call("open", **asdict(opening))
    session = AgentSession(runtime, server, opening.key, sample, resumed_turns=opened["turns"])
    watch = _GateWatch(session, server, runtime.state.gate, ticket)
    is_cut_short = False
    try:
        if opened["refusal"] is not None and max_turns != 1:
            raise UserError(
                f"{config.hf_checkpoint}: {opened['refusal']}; an agent with more than one turn needs a template "
                "that can be continued"
            )
        if not evaluating.get():
            watch.start()
        yield session
    except asyncio.CancelledError:
        is_cut_short = True
        raise
    except Exception as error:
        if (failure := session.failure()) is not None and not isinstance(error, UserError):
            raise failure from error
        raise
    finally:
        await watch.stop()
        if not session.is_over and not is_cut_short:
            await endpoints.forget(opening)
        if is_cut_short:
            await session.drop(Kind.DEADLINE, "the deadline of this session has passed")
        else:
            await session.drop(Kind.CLOSED, "this session is over")


def agent_server(runtime: RolloutRuntime) -> AgentServer:
    """Return the agent server of a run, created on the first call."""
    return runtime.owned("agent server", lambda: AgentServer(runtime), AgentServer.aclose)


class _GateWatch:
    """Makes a session obey the driver's gate like a request of the driver itself.

    When the gate closes, a session with a ticket counts as in flight at the engines until the agent server confirms
    that it is held. Then it waits at the gate like any request, with its clock stopped and its seat released, and after
    the gate the agent server resumes it. A session without a ticket ends when the gate closes.
    """

    def __init__(self, session: AgentSession, server: RunningServer, gate: Gate, ticket: Ticket | None) -> None:
        self._session, self._server, self._gate, self._ticket = session, server, gate, ticket
        self._closed = asyncio.Event()
        self._is_held = self._counts = False
        self._minding: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start watching the gate; if it is closed, hold the session at once."""
        if self._ticket is not None:
            self._ticket.is_used = True
        self._gate.when_closed.append(self._gate_closed)
        self._minding = asyncio.create_task(self._mind_gate())
        if not self._gate.is_open:
            self._gate_closed()

    async def stop(self) -> None:
        """Stop watching, because the session is over."""
        if self._minding is None:
            return
        self._gate.when_closed.remove(self._gate_closed)
        self._minding.cancel()
        await asyncio.gather(self._minding, return_exceptions=True)
        self._leave()

    def _gate_closed(self) -> None:
        if self._is_held:
            return
        self._is_held = True
        if self._ticket is not None:
            self._counts = True
            self._ticket.in_flight += 1
            self._gate.arrived_at_engine()
        self._closed.set()

    def _leave(self) -> None:
        if self._counts and self._ticket is not None:
            self._counts = False
            self._ticket.in_flight -= 1
            self._gate.left_engine()

    async def _mind_gate(self) -> None:
        while True:
            await self._closed.wait()
            if self._ticket is None:
                if not self._session.is_over:
                    await self._session.give_up()
                return
            self._closed.clear()
            try:
                await self._server.remote.call("hold", key=self._session.key)
            except AgentServerFailed:
                return  # the next call on the session raises the failure
            finally:
                self._leave()
            await self._gate.pass_through()
            self._is_held = False
            with suppress(AgentServerFailed):
                await self._server.remote.call("release", key=self._session.key)
