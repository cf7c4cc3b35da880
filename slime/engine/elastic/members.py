"""The engines that have joined a running job: checked when they come, brought to the current weights, forgotten when
they are gone.

Invariant: a joined engine gets requests only while its session at the door lasts and after it has the current weights.
It is never restarted here: one that dies, hangs or cannot take an update is done without, and nothing else ends.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from slime.cluster.ports import is_loopback
from slime.cluster.watchdog import named
from slime.config import Config
from slime.engine.elastic.handshake import Message, Refused
from slime.engine.fleet.external import Capabilities, EngineKind, probe, without_missing
from slime.engine.fleet.supervisor import EngineRetired, RunAsync, Supervisor, Watch
from slime.engine.http.client import EngineClient
from slime.engine.http.errors import EngineUnreachable
from slime.engine.http.pool import EnginePool
from slime.engine.launch import rollout_dtype
from slime.errors import RunFailed, UserError
from slime.models.folder import read_config_json

DRAIN_S = 60.0
_PROBE_S = 30.0

logger = logging.getLogger(__name__)


class Guest(Protocol):
    """Whoever keeps the session of a joined engine; safe to call from any thread or event loop."""

    async def fetch(self, folder: Path) -> str:
        """Have the engine's machine fetch a folder of this one; where it is there."""

    async def forget(self, folder: str) -> None:
        """What was fetched is no longer needed."""

    def dismiss(self, why: str) -> None:
        """End the session: the engine is done without."""


@dataclass(frozen=True)
class Request:
    """What an engine says when it joins. `version` is that of its weights, if this very run (`life`) sent them."""

    url: str
    model_type: str
    vocab_size: int
    dtype: str
    gpus: int
    shares_files: bool
    version: int | None

    @classmethod
    def from_message(cls, message: Message, *, life: str, proof: str) -> Request:
        """Checked as what comes from outside."""
        try:
            url, facts = str(message["url"]), message["facts"]
            address = urlsplit(url)
            if address.scheme != "http" or not address.hostname or not address.port or address.path not in ("", "/"):
                raise ValueError(f"{url} is no address of an engine")
            version = message.get("version")
            is_ours = message.get("life") == life and isinstance(version, int)
            return cls(
                url.rstrip("/"), str(facts["model_type"]), int(facts["vocab_size"]), str(facts["dtype"]),
                int(message["gpus"]), message.get("marker") == proof, version if is_ours else None,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"this is no request to join: {type(error).__name__}: {error}") from error


@dataclass(eq=False)
class Joined:
    """One engine that is here."""

    name: str
    request: Request
    guest: Guest
    since: float = field(default_factory=time.time)
    gone: str | None = None
    has_left: bool = False
    """Whether it went by itself: nobody has to be told."""


class JoinedEngines:
    """They look like a fleet to their supervisor, which owns all changes: whoever holds its lock sees none."""

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        kind: EngineKind,
        pool: EnginePool,
        run_async: RunAsync,
        watch: Watch,
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
        self._members: dict[str, Joined] = {}
        self._names = 0
        self.supervisor = Supervisor(
            self, pool, run_async, watch, refresh=refresh, may_be_empty=True, restarts_any=False
        )

    def terms(self) -> dict[str, Any]:
        """What an engine must be like to join."""
        return {
            "life": self.life, "dtype": self._dtype, "engine_kind": self._kind,
            "model_type": self._model.get("model_type"), "vocab_size": _vocab_size(self._model),
            "gpus": self._config.rollout_num_gpus_per_engine, "trust_remote_code": self._config.trust_remote_code,
        }  # fmt: skip

    # as a fleet

    @property
    def urls(self) -> list[str]:
        return list(self._members)

    def why_ended(self, index: int) -> str | None:
        return list(self._members.values())[index].gone

    def restart(self, index: int) -> None:
        """It is not ours to restart."""
        member = list(self._members.values())[index]
        reason = member.gone or "it does not answer"
        self._drop(member, reason)
        if not member.has_left:
            member.guest.dismiss(reason)
        raise EngineRetired(reason)

    # coming and going

    def join(self, request: Request, guest: Guest) -> Joined:
        """Take an engine in; returns when it has the current weights, or waits for the next update of them."""
        self._check(request)
        with self.supervisor.undisturbed():
            if request.url in self._members:
                self._retire(request.url, "it has joined again")
            self._names += 1
            member = Joined(f"joined-{self._names}", request, guest)
            self._members[request.url] = member
            logger.warning("%s at %s joins", member.name, request.url)
            self.supervisor.welcome(request.url, self._key)
        if self._members.get(request.url) is not member:
            raise Refused(f"{request.url} could not take this run's weights: {member.gone or 'see the log of the run'}")
        return member

    def leave(self, member: Joined) -> None:
        """An engine goes on purpose: what it was sampling goes on elsewhere, with all tokens that it had."""
        url = member.request.url
        if self._members.get(url) is member:
            drained = self._run_async(named(self._pool.drain(url, within_s=DRAIN_S), f"drain of {url}"))
            if not drained:
                logger.warning("%s still had requests when it left: they begin again elsewhere", member.name)
            self.lost(member, "it left")

    def lost(self, member: Joined, reason: str) -> None:
        """An engine is gone; a second time does nothing."""
        url = member.request.url
        member.has_left = True
        member.gone = member.gone or reason

        async def down() -> None:
            if self._members.get(url) is member:
                self._pool.set_down(url)  # at once: whoever holds the supervisor may be waiting for this engine

        self._run_async(named(down(), f"engine pool, marking {url}"))
        with self.supervisor.undisturbed():
            if self._members.get(url) is member:
                self._retire(url, member.gone)

    def blame(self, url: str, reason: str) -> bool:
        """Whether a failure is that of a joined engine: then it is done without at the next look."""
        member = self._members.get(url)
        if member is None:
            return False
        member.gone = member.gone or reason
        return True

    def find(self, name: str) -> Joined | None:
        return next((member for member in list(self._members.values()) if member.name == name), None)

    def members(self) -> list[Joined]:
        return list(self._members.values())

    def version_of(self, url: str) -> int | None:
        """The weights that an engine came with, if this run sent them; once."""
        member = self._members.get(url)
        if member is None or member.request.version is None:
            return None
        version = member.request.version
        member.request = Request(**{**vars(member.request), "version": None})
        return version

    async def deliver(self, client: EngineClient, folder: Path) -> Path | None:
        """Bring a folder to the machine of a joined engine that does not see ours; where it is there."""
        member = self._members.get(client.base_url)
        if member is None or member.request.shares_files:
            return None
        try:
            return Path(await member.guest.fetch(folder))
        except RunFailed as error:
            self.blame(client.base_url, str(error))
            raise EngineUnreachable(client.base_url, "fetching weights", str(error), accepted=True) from error

    async def forget(self, client: EngineClient, folder: Path) -> None:
        """What was delivered is no longer needed."""
        member = self._members.get(client.base_url)
        if member is not None:
            await member.guest.forget(str(folder))

    def _retire(self, url: str, reason: str) -> None:
        self._drop(self._members[url], reason)
        self.supervisor.retire(url, reason)

    def _drop(self, member: Joined, reason: str) -> None:
        member.gone = member.gone or reason
        del self._members[member.request.url]

    # who may join

    def _check(self, request: Request) -> None:
        for name, theirs, ours in (
            ("architecture", request.model_type, self._model.get("model_type")),
            ("vocabulary", request.vocab_size, _vocab_size(self._model)),
            ("precision", request.dtype, self._dtype),
            ("number of GPUs", request.gpus, self._config.rollout_num_gpus_per_engine),
        ):
            if theirs != ours:
                raise Refused(f"the engine at {request.url} has {name} {theirs}, and those of this run {ours}")
        self._check_reach(request.url)
        try:
            found = probe(request.url, timeout_s=_PROBE_S, api_key=self._key)
        except (RunFailed, UserError) as error:
            raise Refused(f"the run cannot use the engine at {request.url}: {error}") from error
        self._check_abilities(request.url, found)

    def _check_reach(self, url: str) -> None:
        """A group for weights that is made on loopback has no room for engines of other machines."""
        own = [one for one in self._pool.urls if one not in self._members]
        is_here = [is_loopback(urlsplit(one).hostname or "") for one in (url, *own)]
        if self._config.update_weight_transport == "nccl" and not is_here[0] and all(is_here[1:]):
            raise Refused(
                f"the engine at {url} cannot reach the group by which this run sends weights, which is on loopback: "
                "start the run without --update-weight-transport nccl"
            )

    def _check_abilities(self, url: str, found: Capabilities) -> None:
        if found.kind != self._kind:
            raise Refused(f"{found} runs at {url}, and this run has {self._kind} engines: use --rollout-backend")
        try:
            changed, sentences = without_missing(self._config, [found])
        except (RunFailed, UserError) as error:
            raise Refused(f"the run cannot use the engine at {url}: {error}") from error
        if changed != self._config:
            raise Refused(f"the run cannot use the engine at {url}: {sentences[0]}")


def _vocab_size(config: dict[str, Any]) -> Any:
    return config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
