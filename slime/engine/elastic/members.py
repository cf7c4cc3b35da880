"""Joined engines of a running job: checks them, brings them to the current weights, removes them when they leave.

Invariant: a joined engine gets requests only while its session lasts and after it has the current weights. It is never
restarted here: an engine that dies, hangs or cannot load an update is removed, and the run continues.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from slime.cluster.ports import is_loopback
from slime.cluster.watchdog import named
from slime.config import Config
from slime.engine.elastic.file_server import FileShares, list_folder_files
from slime.engine.elastic.handshake import JoinRefused, Message, receive_message
from slime.engine.fleet.external import EngineKind, drop_unsupported, probe
from slime.engine.fleet.supervisor import EngineRetired, HealthCheckSettings, PoolLoopRunner, Supervisor
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineUnreachable
from slime.engine.http.pool import EnginePool
from slime.engine.launch import rollout_dtype
from slime.errors import RunFailed, UserError
from slime.models.folder import read_config_json
from slime.storage.json_types import JsonMapping

DRAIN_S = 60.0
_PROBE_S = 30.0
_FETCH_S = 3600.0

logger = logging.getLogger(__name__)


class EngineSession:
    """Connection of one joined engine, in the event loop `loop`; `shares` serves files to its machine."""

    _numbers = itertools.count(1)

    def __init__(self, ws: web.WebSocketResponse, loop: asyncio.AbstractEventLoop, shares: FileShares) -> None:
        self.ws, self._loop, self._shares = ws, loop, shares
        self.ticket = secrets.token_urlsafe(24)
        self.member: JoinedEngine | None = None
        self._fetching: dict[int, asyncio.Future[str]] = {}

    async def process_messages(self) -> None:
        """Process the engine's messages until it leaves."""
        while True:
            message = await receive_message(self.ws)
            kind = message.get("kind")
            if kind == "leave":
                return
            waiting = self._fetching.pop(message["id"], None) if isinstance(message.get("id"), int) else None
            if waiting is not None and not waiting.done():
                if kind == "fetched":
                    waiting.set_result(str(message.get("folder")))
                else:
                    waiting.set_exception(RunFailed(f"its machine could not fetch the files: {message.get('why')}"))

    def is_over(self, why: str) -> None:
        """Fail all fetches that are not finished."""
        for waiting in self._fetching.values():
            if not waiting.done():
                waiting.set_exception(RunFailed(why))
        self._fetching.clear()

    async def end(self, kind: str, why: str) -> None:
        await send_if_open(self.ws, {"kind": kind, "why": why})
        await self.ws.close()

    # for other threads and event loops

    async def fetch(self, folder: Path) -> str:
        """Make the engine's machine fetch a folder of this machine; returns the folder's path there."""
        files = [one.to_json() for one in await asyncio.to_thread(list_folder_files, folder, checksums=False)]
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._fetch(folder, files), self._loop))

    async def forget(self, folder: str) -> None:
        """Make the engine's machine delete a folder that it fetched."""
        sending = send_if_open(self.ws, {"kind": "forget", "folder": folder})
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sending, self._loop))

    def dismiss(self, why: str) -> None:
        """End the session of an engine that the run has removed; does nothing once the server is closed."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.end("dismissed", why), self._loop)

    async def _fetch(self, folder: Path, files: list[list[object]]) -> str:
        number = next(self._numbers)
        waiting = self._fetching[number] = asyncio.get_running_loop().create_future()
        self._shares.put(str(number), folder)
        try:
            async with asyncio.timeout(_FETCH_S):
                await send_if_open(self.ws, {"kind": "fetch", "id": number, "files": files, "ticket": self.ticket})
                return await waiting
        except TimeoutError as error:
            raise RunFailed(f"its machine did not fetch the files within {_FETCH_S:g} s") from error
        finally:
            self._shares.clear(str(number))
            self._fetching.pop(number, None)


async def send_if_open(ws: web.WebSocketResponse, message: Message) -> None:
    """Send a message; a closed connection is ignored."""
    try:
        await ws.send_json(message)
    except (ConnectionError, RuntimeError):
        logger.debug("fleet: the message %s was not sent, the connection is closed", message.get("kind"))


@dataclass(frozen=True)
class JoinRequest:
    """Request of an engine to join. `version` is the version of its weights if this run (`life`) sent them."""

    url: str
    model_type: str
    vocab_size: int
    dtype: str
    gpus: int
    shares_files: bool
    version: int | None

    @classmethod
    def from_message(cls, message: Message, *, life: str, proof: str) -> JoinRequest:
        """Validate and parse a message; raises a `UserError` if it is invalid."""
        try:
            url, facts = str(message["url"]), message["facts"]
            address = urlsplit(url)
            if address.scheme != "http" or not address.hostname or not address.port or address.path not in ("", "/"):
                raise ValueError(f"{url} is not the address of an engine")
            version = message.get("version")
            is_ours = message.get("life") == life and isinstance(version, int)
            return cls(
                url.rstrip("/"), str(facts["model_type"]), int(facts["vocab_size"]), str(facts["dtype"]),
                int(message["gpus"]), message.get("marker") == proof, version if is_ours else None,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise JoinRefused(f"invalid request to join: {type(error).__name__}: {error}") from error


@dataclass(eq=False)
class JoinedEngine:
    """An engine that has joined; `gone` is the reason why it was removed."""

    name: str
    request: JoinRequest
    guest: EngineSession
    since: float = field(default_factory=time.time)
    gone: str | None = None
    has_left: bool = False
    """True if the engine has left or its connection broke, so that its session is not dismissed."""


class JoinedEngines:
    """The joined engines of a run, with the interface of a fleet. All changes are made under the supervisor's lock."""

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        kind: EngineKind,
        pool: EnginePool,
        run_async: PoolLoopRunner,
        watch: HealthCheckSettings,
        refresh: Callable[[str], bool] | None,
        key: str,
    ) -> None:
        assert config.hf_checkpoint is not None, "a run with engines has a model"
        self._config = config
        self._kind = kind
        self._dtype = rollout_dtype(config, device)
        self._model = read_config_json(config.hf_checkpoint)
        self._pool = pool
        self._run_async = run_async
        self._key = key
        self.life = secrets.token_hex(8)
        self._members: dict[str, JoinedEngine] = {}
        self._names = 0
        self.supervisor = Supervisor(
            self, pool, run_async, watch, refresh=refresh, may_be_empty=True, restarts_any=False
        )

    def terms(self) -> Message:
        """Requirements for an engine that joins."""
        return {
            "life": self.life, "dtype": self._dtype, "engine_kind": self._kind,
            "model_type": self._model.get("model_type"), "vocab_size": _vocab_size(self._model),
            "gpus": self._config.rollout_num_gpus_per_engine, "trust_remote_code": self._config.trust_remote_code,
        }  # fmt: skip

    # interface of a fleet

    @property
    def urls(self) -> list[str]:
        return list(self._members)

    def why_ended(self, index: int) -> str | None:
        return list(self._members.values())[index].gone

    def restart(self, index: int) -> None:
        """Remove an engine and raise `EngineRetired`: joined engines are not restarted."""
        member = list(self._members.values())[index]
        reason = member.gone or "it does not answer"
        self._drop(member, reason)
        if not member.has_left:
            member.guest.dismiss(reason)
        raise EngineRetired(reason)

    # joining and leaving

    def join(self, request: JoinRequest, guest: EngineSession) -> JoinedEngine:
        """Add an engine; returns once it has the current weights or waits for the next update."""
        self._check(request)
        with self.supervisor.undisturbed():
            if request.url in self._members:
                self._retire(request.url, "it has joined again")
            self._names += 1
            member = JoinedEngine(f"joined-{self._names}", request, guest)
            self._members[request.url] = member
            logger.warning("%s at %s joins", member.name, request.url)
            self.supervisor.welcome(request.url, self._key)
        if self._members.get(request.url) is not member:
            raise JoinRefused(
                f"{request.url} could not load this run's weights: {member.gone or 'see the log of the run'}"
            )
        return member

    def leave(self, member: JoinedEngine) -> None:
        """Drain and remove an engine: its requests are continued on other engines with all tokens sampled so far."""
        url = member.request.url
        if self._members.get(url) is member:
            drained = self._run_async(named(self._pool.drain(url, within_s=DRAIN_S), f"drain of {url}"))
            if not drained:
                logger.warning("%s left with requests in flight: they restart on other engines", member.name)
            self.lost(member, "it left")

    def lost(self, member: JoinedEngine, reason: str) -> None:
        """Remove an engine that has left or is disconnected. Idempotent."""
        url = member.request.url
        member.has_left = True
        member.gone = member.gone or reason

        async def down() -> None:
            if self._members.get(url) is member:
                self._pool.set_down(url)  # at once: the holder of the supervisor's lock may be waiting for this engine

        self._run_async(named(down(), f"engine pool, marking {url}"))
        with self.supervisor.undisturbed():
            if self._members.get(url) is member:
                self._retire(url, member.gone)

    def report_failure(self, url: str, reason: str) -> bool:
        """Return true if the failed engine is a joined one, which is then removed at the next health check."""
        member = self._members.get(url)
        if member is None:
            return False
        member.gone = member.gone or reason
        return True

    def find(self, name: str) -> JoinedEngine | None:
        return next((member for member in list(self._members.values()) if member.name == name), None)

    def members(self) -> list[JoinedEngine]:
        return list(self._members.values())

    def version_of(self, url: str) -> int | None:
        """Version of the weights that an engine had when it joined, if this run sent them; returned only once."""
        member = self._members.get(url)
        if member is None or member.request.version is None:
            return None
        version = member.request.version
        member.request = JoinRequest(**{**vars(member.request), "version": None})
        return version

    async def deliver(self, client: EngineClient, folder: Path) -> Path | None:
        """Copy a folder to the machine of a joined engine that does not share our files; returns its path there."""
        member = self._members.get(client.base_url)
        if member is None or member.request.shares_files:
            return None
        try:
            return Path(await member.guest.fetch(folder))
        except RunFailed as error:
            self.report_failure(client.base_url, str(error))
            raise EngineUnreachable(client.base_url, "fetching weights", str(error), accepted=True) from error

    async def forget(self, client: EngineClient, folder: Path) -> None:
        """Delete a delivered folder on the engine's machine."""
        member = self._members.get(client.base_url)
        if member is not None:
            await member.guest.forget(str(folder))

    def _retire(self, url: str, reason: str) -> None:
        self._drop(self._members[url], reason)
        self.supervisor.retire(url, reason)

    def _drop(self, member: JoinedEngine, reason: str) -> None:
        member.gone = member.gone or reason
        del self._members[member.request.url]

    # admission

    def _check(self, request: JoinRequest) -> None:
        """Raise a `UserError` if the run cannot use the engine."""
        url = request.url
        for name, theirs, ours in (
            ("architecture", request.model_type, self._model.get("model_type")),
            ("vocabulary", request.vocab_size, _vocab_size(self._model)),
            ("precision", request.dtype, self._dtype),
            ("number of GPUs", request.gpus, self._config.rollout_num_gpus_per_engine),
        ):
            if theirs != ours:
                raise JoinRefused(f"the engine at {url} has {name} {theirs}, and the engines of this run have {ours}")
        # if all other engines are on loopback, the process group for weight updates is on loopback, too
        own = [one for one in self._pool.urls if one not in self._members]
        is_here = [is_loopback(urlsplit(one).hostname or "") for one in (url, *own)]
        if self._config.update_weight_transport == "nccl" and not is_here[0] and all(is_here[1:]):
            raise JoinRefused(
                f"the engine at {url} cannot reach the group by which this run sends weights, which is on loopback: "
                "start the run without --update-weight-transport nccl"
            )
        try:
            found = probe(url, timeout_s=_PROBE_S, api_key=self._key)
        except (RunFailed, UserError) as error:
            raise JoinRefused(f"the run cannot use the engine at {url}: {error}") from error
        if found.kind != self._kind:
            raise JoinRefused(f"{found} runs at {url}, but this run has {self._kind} engines: use --rollout-backend")
        try:
            changed, sentences = drop_unsupported(self._config, [found])
        except (RunFailed, UserError) as error:
            raise JoinRefused(f"the run cannot use the engine at {url}: {error}") from error
        if changed != self._config:
            raise JoinRefused(f"the run cannot use the engine at {url}: {sentences[0]}")


def _vocab_size(config: JsonMapping) -> object:
    return config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
