"""Conversations of external clients, whose requests have the live service's key and a name for the conversation.

A conversation is an ordinary session. When its client continues after an answer, the answer and the client's next
message form an exchange; with consent, and if the filter accepts it, the exchange is stored for training.

Invariants: a request without consent is answered and leaves nothing on any disk. One such request withdraws the consent
of its conversation and deletes the waiting exchanges of earlier conversations with the same name. An answer that is not
followed by a message is never stored. An exchange that the filter does not accept is not stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.agent.interaction import Exchange, ExchangeStore, exchange_of
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.request_limits import Intake, IntakeLimits
from slime.agent.server.sessions import OpenSession, Sessions
from slime.agent.server.settings import LiveSettings, Opening
from slime.agent.session.session import Prompt
from slime.config.plugins import load_plugin
from slime.storage.json_types import JsonMapping

NAME, CONSENT, DONE = "X-Session-Id", "X-Consent", "X-Session-Done"
LONGEST_NAME = 200
POLL_S = 30.0
"""Seconds after which a call for an exchange returns None."""
_YES, _NO = ("yes", "true", "1"), ("no", "false", "0", "")

logger = logging.getLogger(__name__)


@dataclass
class _Conversation:
    name: str
    key: str
    held: OpenSession
    consents: bool
    last: float
    """Time of the last request, or the last time at which a request was being answered."""
    seen: set[str]
    """Turns that were followed by a message."""
    is_done: bool = False
    """The answer in flight is the last one."""


class LiveConversations:
    """The open conversations of a live service, and the store of their exchanges."""

    def __init__(self, settings: LiveSettings, sessions: Sessions) -> None:
        self._settings, self._sessions = settings, sessions
        self.store = ExchangeStore(Path(settings.store))
        """The exchanges that wait to be trained on."""
        path = settings.filter_path
        self._filter = None if path is None else load_plugin(path, "--live-filter-path")
        self._open: OrderedDict[str, _Conversation] = OrderedDict()
        """Open conversations by name, in the order of eviction."""
        most = max(settings.most_conversations, IntakeLimits.requests)
        self._entering = sessions.common_intake(settings.limits.get("max_context"), most, "new conversations")
        """Limits of the first requests of conversations, until they are read: a client may use any number of names."""
        self._keeping: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._sweeping = asyncio.create_task(self._sweep())

    def is_for(self, key: str | None) -> bool:
        """True if a request has the service's key."""
        given = (key or "").encode(errors="surrogateescape")
        return key is not None and hmac.compare_digest(given, self._settings.key.encode())

    def intake(self, headers: Mapping[str, str]) -> Intake:
        """The limits for a request; its conversation need not be open yet. Raises `Problem`."""
        found = self._open.get(_conversation_name(headers))
        return self._entering if found is None else found.held.intake

    async def enter(self, headers: Mapping[str, str]) -> OpenSession:
        """The session of a request's conversation, which is opened if needed; raises `Problem`."""
        name, consents = _conversation_name(headers), _flag_header(headers, CONSENT)
        if not consents:
            await self._withdraw(name)
        if name not in self._open and len(self._open) >= self._settings.most_conversations:
            silent = next((one for one in self._open.values() if not one.held.is_answering), None)
            if silent is None:
                self.counts["refused"] += 1
                raise Problem(Kind.FULL, f"{len(self._open)} conversations are being answered: retry later")
            self.counts["evicted"] += 1
            await self._end(silent)
        found = self._open.get(name) or self._opened(name, consents)
        found.consents &= consents
        found.last = asyncio.get_running_loop().time()
        self._open.move_to_end(name)
        found.is_done = _flag_header(headers, DONE)
        if found.is_done:
            self._open.move_to_end(name, last=False)
        return found.held

    async def take(self, slot: int) -> JsonMapping | None:
        """The record of an exchange for this slot; None if none arrives within `POLL_S` seconds."""
        deadline = asyncio.get_running_loop().time() + POLL_S
        while True:
            self._arrived.clear()
            record = await asyncio.to_thread(self.store.take, slot)
            left = deadline - asyncio.get_running_loop().time()
            if record is not None or left <= 0:
                return record
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                continue

    def stats(self) -> dict[str, int]:
        """Counters of events, and the number of waiting exchanges."""
        return {**self.counts, "open": len(self._open), "waiting": self.store.waiting()}

    async def aclose(self) -> None:
        """Finish the pending writes, and close the store."""
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, *self._keeping, return_exceptions=True)
        logger.info("the live service ends: %s", dict(self.counts))
        await asyncio.to_thread(self.store.close)

    def _opened(self, name: str, consents: bool) -> _Conversation:
        settings = self._settings
        key = f"live-{secrets.token_urlsafe(24)}"
        held = self._sessions.open(
            Opening(
                key=key,
                params=dict(settings.params),
                limits=dict(settings.limits),
                strict=settings.strict,
                template_kwargs=dict(settings.template_kwargs),
                routing=settings.routing,
            )
        )
        made = _Conversation(name, key, held, consents, asyncio.get_running_loop().time(), set())
        held.continued = lambda prompt: self._continued(made, prompt)
        self._open[name] = made
        self.counts["conversations"] += 1
        self.counts["consented"] += consents
        return made

    async def _withdraw(self, name: str) -> None:
        """Withdraw consent: deletes waiting exchanges of this name, and its open conversation adds none."""
        known = self._open.get(name)
        if known is not None:
            if not known.consents:
                return
            known.consents = False
            self.counts["withdrawn"] += 1
        await self.store.withdraw(self._hidden(name))

    def _continued(self, conversation: _Conversation, prompt: Prompt) -> asyncio.Future[None]:
        """Handle a message after an answer; the future is done when the exchange is stored or discarded."""
        turn = prompt.node.parent
        self.counts["answers"] += 1
        nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        if turn is None or turn.id in conversation.seen:
            return nothing
        conversation.seen.add(turn.id)
        if not conversation.consents:
            return nothing
        said = tuple(held.message for held in prompt.node.messages)
        exchange = exchange_of(conversation.held.session, turn, said)
        task = asyncio.create_task(self._keep(conversation, exchange))
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)
        return asyncio.shield(task)

    async def _keep(self, conversation: _Conversation, exchange: Exchange) -> None:
        try:
            may_be_kept = self._filter is None or await asyncio.to_thread(self._filter, exchange) is True
        except Exception as error:  # noqa: BLE001 - a filter that raises has not accepted
            logger.warning("--live-filter-path raised %s: the exchange is not stored", type(error).__name__)
            may_be_kept = False
        if not may_be_kept:
            self.counts["filtered"] += 1
            return
        if not conversation.consents:  # withdrawn while the filter ran
            return
        await self.store.put(self._hidden(conversation.name), exchange.to_record())
        self.counts["kept"] += 1
        self._arrived.set()

    async def _sweep(self) -> None:
        """End idle conversations."""
        while True:
            await asyncio.sleep(min(1.0, self._settings.idle_s / 4))
            now = asyncio.get_running_loop().time()
            for one in list(self._open.values()):
                if one.held.is_answering:
                    one.last = now
                elif one.is_done or one.last < now - self._settings.idle_s:
                    await self._end(one)

    async def _end(self, conversation: _Conversation) -> None:
        if self._open.pop(conversation.name, None) is None:
            return
        turns = conversation.held.session.tree.turns
        if conversation.consents:
            self.counts["unlabelled"] += sum(name not in conversation.seen for name in turns)
        await self._sessions.close(conversation.key, Problem(Kind.CLOSED, "this conversation is over"))

    def _hidden(self, name: str) -> str:
        """The name of a conversation in the store: a hash, because clients may put any text into names."""
        key = self._settings.key.encode()[:64]
        return hashlib.blake2b(name.encode(errors="surrogateescape"), key=key, digest_size=16).hexdigest()


def _conversation_name(headers: Mapping[str, str]) -> str:
    name = headers.get(NAME, "").strip()
    if not name or len(name) > LONGEST_NAME:
        raise Problem(
            Kind.BAD_BODY,
            f"the header {NAME} must name the conversation, in 1 to {LONGEST_NAME} characters: the same for all its "
            "requests, and another for every other conversation",
            param=NAME,
        )
    return name


def _flag_header(headers: Mapping[str, str], name: str) -> bool:
    value = headers.get(name, "").strip().lower()
    if value not in (*_YES, *_NO):
        raise Problem(Kind.BAD_BODY, f"the header {name} must be yes or no, not {value!r:.40}", param=name)
    return value in _YES
