"""`slime serve --join`: engines of this machine that work for a run on another machine.

Invariant: SIGTERM drains the engines: before they end, the run stops sending them requests and continues the
interrupted ones on other engines with all tokens sampled so far. If the run is unreachable, the engines wait for it; if
it is over or refuses them, they end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from slime.cluster.devices import resolve_device
from slime.cluster.ports import own_address
from slime.cluster.rpc.connect import TOKEN_VARIABLE
from slime.cluster.watchdog import ending_signals
from slime.config import Config
from slime.config.parser import parse_flags
from slime.engine.elastic.file_server import FetchFailed, ListedFile, digest, fetch
from slime.engine.elastic.handshake import (
    Disconnected,
    JoinRefused,
    Message,
    RunUnreachable,
    connect_to_run,
    joined_engine_key,
    read_token,
    receive_message,
    split_address,
)
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.blocking import NoResponse, ask
from slime.engine.launch import engine_url
from slime.errors import RunFailed, UserError
from slime.models.folder import read_config_json

DEFAULT_PATIENCE_S = 600.0
_RECONNECT_S = 2.0
_CHECK_S = 0.5
_LEAVE_S = 90.0
_LOOPBACK = Config.__dataclass_fields__["host"].default
_WILDCARDS = ("0.0.0.0", "::", "")


def wants_to_join(words: Sequence[str]) -> bool:
    """Return true if this command line joins a run."""
    return any(word.partition("=")[0] == "--join" for word in words)


def join_command(words: Sequence[str]) -> int:
    """Run `slime serve --join HOST:PORT ...`; returns when the engines have ended."""
    own = argparse.ArgumentParser(prog="slime serve --join", add_help=False, allow_abbrev=False)
    own.add_argument("--join", required=True)
    own.add_argument("--join-token-file")
    own.add_argument("--join-patience", type=float, default=DEFAULT_PATIENCE_S)
    own.add_argument("--model-path")
    given, rest = own.parse_known_args(list(words))
    split_address(given.join, "--join")
    token = read_token(given.join_token_file)
    os.environ.pop(TOKEN_VARIABLE, None)  # engines do not need the token
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
            with contextlib.suppress(OSError):  # fails if engines were started: their logs are there
                run_dir.rmdir()
    return 0


class Joiner:
    """The engines of one command, each with its own session at the run."""

    def __init__(
        self, address: str, token: str, config: Config, folder: str | None, run_dir: Path, *, patience_s: float
    ) -> None:
        self.address, self.token, self._config = address, token, config
        self.run_url = engine_url(*split_address(address, "--join"))
        self._folder, self._run_dir, self._patience_s = folder, run_dir, patience_s
        self.weights_dir = (run_dir / "weights").absolute()  # fetched weights
        self._key = joined_engine_key(token)
        self.stop = asyncio.Event()
        self._facts: Message = {}

    async def run(self) -> None:
        """Start the engines and keep them in the run until a signal or the end of the run."""
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self.stop.set)
        terms = await self.fetch_terms()
        config = self._config
        each = config.rollout_num_gpus_per_engine
        gpus = config.rollout_num_gpus or each
        if gpus % each:
            raise UserError(f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {each}")
        config = config.replace(
            hf_checkpoint=self._folder,
            rollout_backend=terms["engine_kind"] if config.rollout_backend == "auto" else config.rollout_backend,
            rollout_dtype=terms["dtype"],
            rollout_num_gpus=gpus,
            colocate=True,  # use the GPUs from the first one on
            host=own_address(self.run_url) if config.host == _LOOPBACK else config.host,
            use_fault_tolerance=True,  # responses are streamed
        )
        device = resolve_device(config.device)
        assert config.hf_checkpoint is not None
        fleet = EngineFleet(
            config, device=device, run_dir=self._run_dir, model_path=config.hf_checkpoint, key=self._key
        )
        _print_line(f"starting {fleet.size} {fleet.backend} engine(s) on {device}, logs in {self._run_dir / 'logs'}")
        try:
            starting = asyncio.ensure_future(asyncio.to_thread(fleet.start))
            stopping = asyncio.ensure_future(self.stop.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not starting.done():
                fleet.stop()
                await asyncio.gather(starting, return_exceptions=True)
                return
            await starting
            await self._work(fleet)
        finally:
            fleet.stop()
            shutil.rmtree(self.weights_dir, ignore_errors=True)

    # before the engines start

    async def fetch_terms(self) -> Message:
        """Request the run's terms, check the model folder against them, and fetch it if none was given."""
        async with connect_to_run(self.address, self.token, wants="terms") as ws:
            terms = await _receive_kind(ws, "terms")
            if terms.get("trust_remote_code") and not self._config.trust_remote_code:
                raise UserError("the run's model has custom code: add --trust-remote-code if you trust it")
            if self._folder is None:
                await ws.send_json({"kind": "model"})
                files = [ListedFile.from_json(one) for one in (await _receive_kind(ws, "model"))["files"]]
                ticket = terms["ticket"]
                folder = Path.home() / ".cache" / "slime" / "models" / digest(files)
                if not folder.is_dir():
                    size = sum(one.size for one in files)
                    _print_line(f"fetching the model ({size / 2**20:.3g} MiB) from {self.address} to {folder}")
                    await fetch(self.run_url, ticket, "model", files, folder)
                self._folder = str(folder)
        model = read_config_json(self._folder)
        vocab_size = model.get("vocab_size", model.get("text_config", {}).get("vocab_size"))
        self._facts = {"model_type": model.get("model_type"), "vocab_size": vocab_size, "dtype": terms["dtype"]}
        for name, found in self._facts.items():
            if found != terms[name]:
                raise UserError(
                    f"--model-path {self._folder} has {name} {found}, and the run's model has {terms[name]}: give the "
                    "run's model, or drop the flag to fetch it"
                )
        return terms

    # while the engines work

    async def _work(self, fleet: EngineFleet) -> None:
        """Keep every engine in the run until all of them have left; raise if an engine process ends."""

        async def watch() -> None:
            while True:
                fleet.check()
                await asyncio.sleep(_CHECK_S)

        staying = [asyncio.ensure_future(self._stay(url)) for url in fleet.urls]
        all_left, watching = asyncio.gather(*staying), asyncio.ensure_future(watch())
        try:
            await asyncio.wait((all_left, watching), return_when=asyncio.FIRST_COMPLETED)
            await (watching if watching.done() else all_left)
        finally:
            for task in (*staying, watching):
                task.cancel()
            await asyncio.gather(*staying, watching, return_exceptions=True)

    async def _stay(self, url: str) -> None:
        """Keep one engine in the run, and join again after a broken connection."""
        loop, life, since = asyncio.get_running_loop(), None, None
        while not self.stop.is_set():
            try:
                session = JoinSession(self, url, life)
                if await session.run_until_left(self.stop):
                    return
            except (RunUnreachable, Disconnected, ConnectionError) as error:
                life = session.life
                since = loop.time() if since is None or session.was_in else since
                if loop.time() - since > self._patience_s:
                    raise UserError(
                        f"--join-patience: the run at {self.address} did not come back within {self._patience_s:g} s: "
                        f"{error}"
                    ) from error
                _print_line(f"{url} waits for the run at {self.address}: {error}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), _RECONNECT_S)

    def request(self, url: str, life: str | None, terms: Message) -> Message:
        """Request of an engine to join, with the version of its weights if the run (`life`) sent them."""
        reachable_url = url
        if self._config.host in _WILDCARDS:  # on all interfaces: the run uses the one that routes to it
            reachable_url = engine_url(own_address(self.run_url), int(url.rpartition(":")[2]))
        version: int | None = None
        if life is not None:
            with contextlib.suppress(NoResponse, KeyError, TypeError, ValueError):
                _, answer = ask("GET", f"{url}/get_weight_version", timeout_s=10.0, api_key=self._key)
                version = int(answer["weight_version"])
        marker: str | None = None  # the content of this file proves that this machine sees the run's folder of weights
        with contextlib.suppress(OSError, ValueError):
            marker = Path(str(terms.get("marker"))).read_text()
        return {
            "wants": "join", "url": reachable_url, "facts": self._facts,
            "gpus": self._config.rollout_num_gpus_per_engine, "life": life, "version": version, "marker": marker,
        }  # fmt: skip


class JoinSession:
    """One connection of an engine to the run, from joining to leaving."""

    def __init__(self, joiner: Joiner, url: str, life: str | None) -> None:
        self._joiner, self._url, self.life = joiner, url, life
        self.was_in = False
        self._fetching: set[asyncio.Task[None]] = set()

    async def run_until_left(self, stop: asyncio.Event) -> bool:
        """Join the run and process its messages; returns true if the engine has left or the run is over."""
        joiner = self._joiner
        async with connect_to_run(joiner.address, joiner.token, wants="terms") as ws:
            terms = await _receive_kind(ws, "terms")
        request = await asyncio.to_thread(joiner.request, self._url, self.life, terms)
        async with connect_to_run(joiner.address, joiner.token, **request) as ws:
            leaving = asyncio.ensure_future(self._leave_when(stop, ws))
            try:
                return await self._hear(ws)
            except TimeoutError:
                _print_line(f"{self._url}: the run did not release the engine in time; leaving anyway")
                return True
            finally:
                for task in (leaving, *self._fetching):
                    task.cancel()
                await asyncio.gather(leaving, *self._fetching, return_exceptions=True)

    async def _leave_when(self, stop: asyncio.Event, ws: aiohttp.ClientWebSocketResponse) -> None:
        await stop.wait()
        _print_line(f"{self._url}: draining")
        await ws.send_json({"kind": "leave"})
        await asyncio.sleep(_LEAVE_S)
        _print_line(f"{self._url}: the run did not release the engine within {_LEAVE_S:g} s; leaving anyway")
        await ws.close()

    async def _hear(self, ws: aiohttp.ClientWebSocketResponse) -> bool:
        while True:
            message = await receive_message(ws)
            kind = message.get("kind")
            if kind == "joined":
                self.was_in, self.life = True, message.get("life")
                _print_line(f"joined the run at {self._joiner.address} as {message.get('name')} ({self._url})")
            elif kind == "fetch":
                self._fetching.add(asyncio.ensure_future(self._fetch(ws, message)))
            elif kind == "forget":
                path = Path(str(message.get("folder")))
                if path.parent == self._joiner.weights_dir:
                    shutil.rmtree(path, ignore_errors=True)
            elif kind == "drain":
                self._joiner.stop.set()
            elif kind in ("left", "goodbye"):
                _print_line(f"{self._url} has left the run" + (", which is over" if kind == "goodbye" else ""))
                return True
            elif kind == "refused":
                raise JoinRefused(str(message.get("why")))
            elif kind == "dismissed":
                raise RunFailed(f"the run removed the engine at {self._url}: {message.get('why')}")
            elif kind == "away":
                raise Disconnected("the run has stopped and may be resumed")

    async def _fetch(self, ws: aiohttp.ClientWebSocketResponse, message: Message) -> None:
        joiner, number = self._joiner, message.get("id")
        try:
            files = [ListedFile.from_json(one) for one in message["files"]]
            folder = joiner.weights_dir / str(message["id"])
            await fetch(joiner.run_url, message["ticket"], str(message["id"]), files, folder)
        except (FetchFailed, ValueError, KeyError, TypeError) as error:
            await ws.send_json({"kind": "failed", "id": number, "why": str(error)})
        else:
            await ws.send_json({"kind": "fetched", "id": number, "folder": str(folder)})


async def _receive_kind(ws: aiohttp.ClientWebSocketResponse, kind: str) -> Message:
    message = await receive_message(ws)
    if message.get("kind") == "refused":
        raise JoinRefused(str(message.get("why")))
    if message.get("kind") != kind:
        raise Disconnected(f"the run answered {message.get('kind')} instead of {kind}")
    return message


def _print_line(text: str) -> None:
    print(text, flush=True)
