"""`slime serve --join`: engines of this machine that work for a run elsewhere, for as long as both want.

Invariant: SIGTERM drains: the run takes no more work here and goes on elsewhere with all that was sampled, before the
engines end. A run that cannot be reached is waited for; one that is over, or wants none of these engines, ends them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from slime.cluster.devices import resolve_device
from slime.cluster.ports import own_address
from slime.cluster.rpc.connect import TOKEN_VARIABLE
from slime.cluster.watchdog import ending_signals
from slime.config import Config
from slime.config.parser import parse_flags
from slime.engine.elastic.file_server import FetchFailed, Listed, digest, fetch
from slime.engine.elastic.handshake import (
    Disconnected,
    Message,
    NobodyThere,
    Refused,
    key_of_joined,
    read_token,
    received,
    split_address,
    url_of,
    visiting,
)
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.blocking import NoAnswer, ask
from slime.errors import RunFailed, UserError
from slime.models.folder import read_config_json

DEFAULT_PATIENCE_S = 600.0
_AGAIN_S = 2.0
_CHECK_S = 0.5
_LEAVE_S = 90.0
_LOOPBACK = Config.__dataclass_fields__["host"].default
_WILDCARDS = ("0.0.0.0", "::", "")


def wants_to_join(words: Sequence[str]) -> bool:
    """Whether this command line is about a run elsewhere."""
    return any(word.partition("=")[0] == "--join" for word in words)


def join_command(words: Sequence[str]) -> int:
    """`slime serve --join HOST:PORT ...`; returns when the engines have ended."""
    own = argparse.ArgumentParser(prog="slime serve --join", add_help=False, allow_abbrev=False)
    own.add_argument("--join", required=True)
    own.add_argument("--join-token-file")
    own.add_argument("--join-patience", type=float, default=DEFAULT_PATIENCE_S)
    own.add_argument("--model-path")
    given, rest = own.parse_known_args(list(words))
    split_address(given.join, "--join")
    token = read_token(given.join_token_file)
    os.environ.pop(TOKEN_VARIABLE, None)  # engines need not know it
    config = parse_flags(rest)
    if config.rollout_external_engine_addrs:
        raise UserError("--rollout-external-engine-addrs names engines that run already: slime serve starts its own")
    folder = given.model_path or config.hf_checkpoint
    run_dir = Path(config.output_dir or tempfile.mkdtemp(prefix="slime-join-"))
    joiner = Joiner(given.join, token, config, folder, run_dir, patience_s=given.join_patience)
    try:
        asyncio.run(joiner.run())
    finally:
        if not config.output_dir:
            with contextlib.suppress(OSError):  # engines that began have left their logs there
                run_dir.rmdir()
    return 0


class Joiner:
    """All engines of one command, each with a session of its own at the run's door."""

    def __init__(
        self, address: str, token: str, config: Config, folder: str | None, run_dir: Path, *, patience_s: float
    ) -> None:
        self.address, self.token, self._config = address, token, config
        self._door = url_of(*split_address(address, "--join"))
        self._folder, self._run_dir, self._patience_s = folder, run_dir, patience_s
        self._key = key_of_joined(token)
        self.stop = asyncio.Event()
        self._facts: dict[str, Any] = {}

    async def run(self) -> None:
        """Until told to stop, or the run is over."""
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self.stop.set)
        terms = await self.first_terms()
        config = self._engine_config(terms)
        device = resolve_device(config.device)
        assert config.hf_checkpoint is not None
        fleet = EngineFleet(
            config, device=device, run_dir=self._run_dir, model_path=config.hf_checkpoint, key=self._key
        )
        _say(f"starting {fleet.size} {fleet.backend} engine(s) on {device}, logs in {self._run_dir / 'logs'}")
        try:
            if await self._unless_stopped(asyncio.to_thread(fleet.start), fleet.stop):
                await self._work(fleet)
        finally:
            fleet.stop()
            shutil.rmtree(self._run_dir / "weights", ignore_errors=True)

    async def _unless_stopped(self, starting: Coroutine[Any, Any, Any], give_up: Callable[[], None]) -> bool:
        """Whether it came to its end before somebody stopped us."""
        task, stopping = asyncio.ensure_future(starting), asyncio.ensure_future(self.stop.wait())
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            give_up()
            await asyncio.gather(task, return_exceptions=True)
            return False
        await task
        return True

    # before the engines start

    async def first_terms(self) -> Message:
        """What the run expects; the model folder is here afterwards."""
        async with visiting(self.address, self.token, wants="terms") as ws:
            terms = await _expected(ws, "terms")
            if terms.get("trust_remote_code") and not self._config.trust_remote_code:
                raise UserError("the run's model has code of its own: add --trust-remote-code if you trust it")
            if self._folder is None:
                await ws.send_json({"kind": "model"})
                files = [Listed.from_json(one) for one in (await _expected(ws, "model"))["files"]]
                self._folder = str(await self._fetched_model(files, terms["ticket"]))
        model = read_config_json(self._folder)
        vocab_size = model.get("vocab_size", model.get("text_config", {}).get("vocab_size"))
        self._facts = {"model_type": model.get("model_type"), "vocab_size": vocab_size, "dtype": terms["dtype"]}
        for name, found in self._facts.items():
            if found != terms[name]:
                raise UserError(
                    f"--model-path {self._folder} has {name} {found}, and the run's model {terms[name]}: give the "
                    "run's model, or leave the flag out to fetch it"
                )
        return terms

    async def _fetched_model(self, files: Sequence[Listed], ticket: str) -> Path:
        folder = Path.home() / ".cache" / "slime" / "models" / digest(files)
        if not folder.is_dir():
            size = sum(one.size for one in files)
            _say(f"fetching the model ({size / 2**20:.3g} MiB) from {self.address} to {folder}")
            await fetch(self._door, ticket, "model", files, folder)
        return folder

    def _engine_config(self, terms: Message) -> Config:
        config = self._config
        each = config.rollout_num_gpus_per_engine
        gpus = config.rollout_num_gpus or each
        if gpus % each:
            raise UserError(f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {each}")
        return config.replace(
            hf_checkpoint=self._folder,
            rollout_backend=terms["engine_kind"] if config.rollout_backend == "auto" else config.rollout_backend,
            rollout_dtype=terms["dtype"],
            rollout_num_gpus=gpus,
            colocate=True,  # GPUs from the first one on
            host=self._own_address() if config.host == _LOOPBACK else config.host,
            use_fault_tolerance=True,  # answers are streamed
        )

    def _own_address(self) -> str:
        return own_address(self._door)

    # while they work

    async def _work(self, fleet: EngineFleet) -> None:
        staying = [asyncio.ensure_future(self._stay(url)) for url in fleet.urls]
        watching = asyncio.ensure_future(self._watch(fleet))
        try:
            while any(not one.done() for one in staying):
                done, _ = await asyncio.wait((*staying, watching), return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
                staying = [one for one in staying if not one.done()] or staying
        finally:
            for task in (*staying, watching):
                task.cancel()
            await asyncio.gather(*staying, watching, return_exceptions=True)

    async def _watch(self, fleet: EngineFleet) -> None:
        while True:
            fleet.check()
            await asyncio.sleep(_CHECK_S)

    async def _stay(self, url: str) -> None:
        """Keep one engine in the run, over whatever breaks the connection."""
        loop, life, since = asyncio.get_running_loop(), None, None
        while not self.stop.is_set():
            try:
                session = Session(self, url, life)
                if await session.worked(self.stop):
                    return
            except (NobodyThere, Disconnected, ConnectionError) as error:
                life = session.life
                since = loop.time() if since is None or session.was_in else since
                if loop.time() - since > self._patience_s:
                    raise UserError(
                        f"the run at {self.address} did not come back within {self._patience_s:g} s "
                        f"(--join-patience): {error}"
                    ) from error
                _say(f"{url} waits for the run at {self.address}: {error}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), _AGAIN_S)

    def request(self, url: str, life: str | None, terms: Message) -> Message:
        """What an engine says of itself when it joins."""
        return {
            "wants": "join", "url": self._announced(url), "facts": self._facts,
            "gpus": self._config.rollout_num_gpus_per_engine, "life": life, "version": self._version(url, life),
            "marker": _marker(terms),
        }  # fmt: skip

    def _announced(self, url: str) -> str:
        """Where the run reaches the engine: a server on all interfaces is reached by the one that leads to the run."""
        if self._config.host not in _WILDCARDS:
            return url
        return url_of(self._own_address(), int(url.rpartition(":")[2]))

    def _version(self, url: str, life: str | None) -> int | None:
        """The weights that it has, if the run sent them."""
        if life is None:
            return None
        try:
            version = ask("GET", f"{url}/get_weight_version", timeout_s=10.0, api_key=self._key)[1]["weight_version"]
            return int(version)
        except (NoAnswer, KeyError, TypeError, ValueError):
            return None

    async def fetched(self, message: Message) -> str:
        """Bring weights here; the folder that they are in."""
        files = [Listed.from_json(one) for one in message["files"]]
        folder = (self._run_dir / "weights" / str(message["id"])).absolute()
        await fetch(self._door, message["ticket"], str(message["id"]), files, folder)
        return str(folder)

    def forget(self, folder: str) -> None:
        path = Path(folder)
        if path.parent == (self._run_dir / "weights").absolute():
            shutil.rmtree(path, ignore_errors=True)


class Session:
    """One engine at the run's door, from its coming to its going."""

    def __init__(self, joiner: Joiner, url: str, life: str | None) -> None:
        self._joiner, self._url, self.life = joiner, url, life
        self.was_in = False
        self._fetching: set[asyncio.Task[None]] = set()

    async def worked(self, stop: asyncio.Event) -> bool:
        """Whether it is over for good: it left, or the run did."""
        joiner = self._joiner
        async with visiting(joiner.address, joiner.token, wants="terms") as ws:
            terms = await _expected(ws, "terms")
        request = await asyncio.to_thread(joiner.request, self._url, self.life, terms)
        async with visiting(joiner.address, joiner.token, **request) as ws:
            leaving = asyncio.ensure_future(self._leave_when(stop, ws))
            try:
                return await self._hear(ws)
            except TimeoutError:
                _say(f"{self._url} was not let go in time and leaves without it")
                return True
            finally:
                for task in (leaving, *self._fetching):
                    task.cancel()
                await asyncio.gather(leaving, *self._fetching, return_exceptions=True)

    async def _leave_when(self, stop: asyncio.Event, ws: aiohttp.ClientWebSocketResponse) -> None:
        await stop.wait()
        _say(f"{self._url} hands over its requests")
        await ws.send_json({"kind": "leave"})
        await asyncio.sleep(_LEAVE_S)
        _say(f"{self._url} was not let go within {_LEAVE_S:g} s and ends all the same")
        await ws.close()

    async def _hear(self, ws: aiohttp.ClientWebSocketResponse) -> bool:
        while True:
            message = await received(ws)
            kind = message.get("kind")
            if kind == "joined":
                self.was_in, self.life = True, message.get("life")
                _say(f"joined the run at {self._joiner.address} as {message.get('name')} ({self._url})")
            elif kind == "fetch":
                self._fetching.add(asyncio.ensure_future(self._fetch(ws, message)))
            elif kind == "forget":
                self._joiner.forget(str(message.get("folder")))
            elif kind == "drain":
                self._joiner.stop.set()
            elif kind in ("left", "goodbye"):
                _say(f"{self._url} is out of the run" + (", which is over" if kind == "goodbye" else ""))
                return True
            elif kind == "refused":
                raise Refused(str(message.get("why")))
            elif kind == "dismissed":
                raise RunFailed(f"the run does without the engine at {self._url}: {message.get('why')}")
            elif kind == "away":
                raise Disconnected("the run has stopped; it may go on")

    async def _fetch(self, ws: aiohttp.ClientWebSocketResponse, message: Message) -> None:
        number = message.get("id")
        try:
            folder = await self._joiner.fetched(message)
        except (FetchFailed, ValueError, KeyError, TypeError) as error:
            await ws.send_json({"kind": "failed", "id": number, "why": str(error)})
        else:
            await ws.send_json({"kind": "fetched", "id": number, "folder": folder})


async def _expected(ws: aiohttp.ClientWebSocketResponse, kind: str) -> Message:
    message = await received(ws)
    if message.get("kind") == "refused":
        raise Refused(str(message.get("why")))
    if message.get("kind") != kind:
        raise Disconnected(f"the run answered {message.get('kind')} in place of {kind}")
    return message


def _marker(terms: Message) -> str | None:
    """What the run wrote into its folder of weights, if that folder is here too."""
    try:
        return Path(str(terms.get("marker"))).read_text()
    except (OSError, ValueError):
        return None


def _say(text: str) -> None:
    print(text, flush=True)
