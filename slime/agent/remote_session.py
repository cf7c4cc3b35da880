"""Sessions that other programs talk to, from a generate function:

    async with open_session(args, sample, sampling_params) as session:
        await run_my_agent(base_url=session.openai_url, api_key=session.key)
        return await session.finish(reward=1.0)

The first one of a run starts the process of the endpoints (`slime.agent.server`). With `--partial-rollout` sessions
wait at the gate as requests of the driver do. A rollout that is given up ends its sessions: `GivenUp` leaves the block,
and the sample starts over. If the process dies, so does the session: `AgentServerFailed`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from slime.agent.conversation import session_limits, template_kwargs
from slime.agent.messages import Message
from slime.agent.server.control_client import AgentServerFailed
from slime.agent.server.dialects import Kind
from slime.agent.server.settings import Opening
from slime.agent.server.supervisor import AgentServer, RunningServer
from slime.agent.session.records import message_of
from slime.agent.session.session import Session
from slime.agent.session.turn_journal import Attempt, TurnJournal
from slime.data.chat_template import model_context_length
from slime.data.sample import Reward, Sample
from slime.errors import UserError
from slime.rollout.gate import Gate, Ticket, evaluating, ticket_here
from slime.rollout.outcomes import GivenUp
from slime.rollout.runtime import RolloutRuntime, runtime_for

KEY_BYTES = 24


class NoTurns(Exception):
    """A session ended before the model was asked for anything."""


class AgentSession:
    """One attempt at one task, as a generate function sees it while a program works on it.

    `url` is where the endpoints are, `openai_url` and `anthropic_url` what clients of these want as their base URL,
    `key` their API key, and `model` the name to ask for. `unix_socket` serves the same, for sandboxes without a
    network, and `public_url` for those on other machines (`--agent-public-url`).
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
        """What was said up to the last turn; the `reference` of an assistant's message is the id of its turn."""
        self._check()
        said = await self._server.remote.turns(self.key)
        return [message_of(record) for record in said["messages"]]

    def reward(self, turn_id: str, value: float) -> None:
        """Give one turn a reward of its own; several add up."""
        self._rewards.append((turn_id, value))

    async def accept_on(self, listener: socket.socket) -> None:
        """Have the endpoints accept on a listening socket as well, such as one that was opened inside a sandbox."""
        self._check()
        await self._server.remote.accept_on(self.key, listener)

    async def finish(self, reward: Reward | None = None, metadata: Mapping[str, Any] | None = None) -> list[Sample]:
        """End the session, and its clients; what was sampled as samples."""
        self._check()
        self.is_over = True
        collected = await self._server.remote.collect(self.key, Kind.CLOSED, "this session has been finished")
        self._server.warn(collected["warning"])
        session = await asyncio.to_thread(Session.from_record, collected["record"])
        for turn_id, value in self._rewards:
            session.reward(turn_id, value)
        samples = session.samples(self._base, reward, metadata, args=self._args)
        if not samples:
            why = collected["failure"] or "its client asked for nothing, or was refused"
            raise NoTurns(f"the session has no turn: {why}")
        return samples

    async def drop(self, kind: Kind, message: str) -> None:
        """End the session and forget it; nothing happens to one that has ended."""
        if self.is_over or self.given_up or self._server.died.is_set():
            return
        self.is_over = True
        with suppress(AgentServerFailed):  # whatever it is, the session is gone
            await self._server.remote.drop(self.key, kind, message)

    def failure(self) -> Exception | None:
        """What ended the session from outside."""
        if self.given_up:
            return _given_up()
        return self._server.failure() if self._server.died.is_set() else None

    def _check(self) -> None:
        if (failure := self.failure()) is not None:
            raise failure
        if self.is_over:
            raise RuntimeError("this session has been finished")


@asynccontextmanager
async def open_session(
    args: Any,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    *,
    max_turns: int | None = None,
    models: Sequence[str] = (),
    resume: bool = False,
) -> AsyncIterator[AgentSession]:
    """A session on behalf of `sample`, under the run's limits (`--max-turns`, `--session-max-tokens`).

    `models` are names that its client may call the model by, beside those that are always known. With `resume` it goes
    on from the turns of an attempt that a crash of the run cut short (`AgentSession.resumed_turns`), for agents whose
    environment has outlived that. Leaving without `finish` drops the session.
    """
    runtime, ticket = runtime_for(args), ticket_here()
    endpoints = agent_server(runtime)
    server = await endpoints.running()
    opening = _opening(runtime, sample, sampling_params, ticket, max_turns, models)
    if endpoints.journal is not None and not evaluating.get():
        opening = await _kept(endpoints.journal, endpoints.run, sample, opening, resume)
    opened = await server.remote.open(opening)
    session = AgentSession(runtime, server, opening.key, sample, resumed_turns=opened["turns"])
    watch = _GateWatch(session, server, runtime.state.gate, ticket)
    is_cut_short = False
    try:
        if opened["refusal"] is not None and max_turns != 1:
            raise UserError(f"{runtime.args.hf_checkpoint}: {opened['refusal']}; agents of several turns need that")
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
            await session.drop(Kind.DEADLINE, "the time of this session is over")
        else:
            await session.drop(Kind.CLOSED, "this session is over")


def agent_server(runtime: RolloutRuntime) -> AgentServer:
    """The endpoints of a run."""
    return runtime.owned("agent server", lambda: AgentServer(runtime), AgentServer.aclose)


def _opening(
    runtime: RolloutRuntime,
    sample: Sample,
    params: Mapping[str, Any],
    ticket: Ticket | None,
    max_turns: int | None,
    models: Sequence[str],
) -> Opening:
    config = runtime.args
    assert config.hf_checkpoint is not None, "a run with engines has a model"
    limits = session_limits(config, params, model_context_length(config.hf_checkpoint), max_turns)
    return Opening(
        key=secrets.token_urlsafe(KEY_BYTES),
        params=dict(params),
        limits=limits.to_dict(),
        strict=config.strict_tokens,
        template_kwargs=template_kwargs(config, sample),
        held=ticket is not None,
        masks=ticket is not None and ticket.masks,
        names=tuple(models),
        routing=config.use_rollout_routing_replay and not evaluating.get(),
    )


async def _kept(journal: TurnJournal, run: str, sample: Sample, opening: Opening, resume: bool) -> Opening:
    """The same session, whose turns are journaled; with those that are in the journal already, if they are wanted."""
    attempt = Attempt.of(run, sample)
    opening = replace(opening, attempt=asdict(attempt))
    if not resume:
        return opening
    earlier = await asyncio.to_thread(journal.restore, attempt)
    return opening if earlier is None else replace(opening, key=earlier.key, record=earlier.to_record())


def _given_up() -> GivenUp:
    return GivenUp("the rollout has what it needs: this session was given up")


class _GateWatch:
    """Does at the driver's gate what the requests of a session would do there, if the driver made them.

    From the moment the gate closes, a session with a ticket counts as being at the engines until the process says that
    it is held; then it waits at the gate like any request, its clock stopped and its seat given to others, and when it
    has passed, the process lets it go on. A session without a ticket ends when the gate closes.
    """

    def __init__(self, session: AgentSession, server: RunningServer, gate: Gate, ticket: Ticket | None) -> None:
        self._session, self._server, self._gate, self._ticket = session, server, gate, ticket
        self._closed = asyncio.Event()
        self._is_held = self._counts = False
        self._minding: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch from now on; a gate that is closed already holds the session at once."""
        if self._ticket is not None:
            self._ticket.is_used = True
        self._gate.when_closed.append(self._gate_closed)
        self._minding = asyncio.create_task(self._mind() if self._ticket is not None else self._give_up())
        if not self._gate.is_open:
            self._gate_closed()

    async def stop(self) -> None:
        """The session is over."""
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

    async def _mind(self) -> None:
        while True:
            await self._closed.wait()
            self._closed.clear()
            try:
                await self._server.remote.hold(self._session.key)
            except AgentServerFailed:
                return  # whoever uses the session finds out
            finally:
                self._leave()
            await self._gate.pass_through()
            self._is_held = False
            with suppress(AgentServerFailed):
                await self._server.remote.release(self._session.key)

    async def _give_up(self) -> None:
        await self._closed.wait()
        if not self._session.is_over:
            self._session.given_up = True
            with suppress(AgentServerFailed):
                await self._server.remote.drop(self._session.key, Kind.CLOSED, "the rollout has what it needs")
