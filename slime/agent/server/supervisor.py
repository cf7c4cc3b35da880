"""Supervises the agent servers of a run: starts them for their first sessions, watches them, and restarts dead ones.

A session is pinned to one process by its key. There is one process for each `SESSIONS_EACH` samples of a batch, as far
as the machine has `CORES_EACH` cores for it; one alone if clients know a fixed address.

Invariants: the processes end with the driver, however that ends. Every change of engines and weights that the driver
sees is reported to each process, in the same order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from slime.agent.conversation import session_limits
from slime.agent.interaction import FILE_NAME as LIVE_FILE
from slime.agent.server.control import AgentServerFailed, RemoteServer
from slime.agent.server.settings import (
    LiveSettings,
    Opening,
    ServerSettings,
    load_or_create_key,
    write_address,
)
from slime.agent.session.turn_journal import FILE_NAME, Attempt, TurnJournal
from slime.cluster.child_env import module_command
from slime.cluster.process import ChildProcess
from slime.cluster.watchdog import waiting
from slime.config import Config
from slime.config.datasets import prompt_files
from slime.data.buffer import run_identity
from slime.data.chat_template import model_context_length
from slime.errors import UserError
from slime.models.parsers.formats import formats_from_flags
from slime.rollout.runtime import RolloutRuntime
from slime.storage.json_types import JsonMapping

NAME = "agent-server"
MOST_SERVERS = 4
SESSIONS_EACH = 32
CORES_EACH = 4

logger = logging.getLogger(__name__)


def server_count(config: Config, cores: int) -> int:
    """The number of processes among which the sessions of a run are divided, on a machine with so many cores."""
    if config.agent_server_port or config.agent_public_url or config.live_judge_path is not None:
        return 1
    batch = config.rollout_batch_size * config.n_samples_per_prompt
    return max(1, min(MOST_SERVERS, cores // CORES_EACH, -(-batch // SESSIONS_EACH)))


class RunningServer:
    """One running agent server process; `died` is set when it has ended."""

    def __init__(
        self,
        child: ChildProcess,
        remote: RemoteServer,
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        warned: set[str],
    ) -> None:
        self.child, self.remote = child, remote
        self.died = asyncio.Event()
        self._warned = warned
        self._reader, self._writer = channel
        self._news: asyncio.Queue[Callable[[], Awaitable[object]]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._run_queued())]

    def tell(self, name: str, **arguments: object) -> None:
        """Queue a control call; calls are made one after the other, in order."""
        self._news.put_nowait(partial(self.remote.call, name, **arguments))

    def warn(self, warning: str | None) -> None:
        """Log a warning of the process in the driver, once for all processes."""
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            logger.warning("%s: %s", NAME, warning)

    def failure(self) -> AgentServerFailed:
        """The error for sessions of a process that died."""
        code = self.child.poll()
        return AgentServerFailed(f"the agent server died (exit code {code}, see {self.child.log_path})")

    async def aclose(self) -> None:
        """End the process and all processes it started, and remove its sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.remote.aclose()
        self._writer.close()
        await asyncio.to_thread(self.child.stop)
        shutil.rmtree(Path(self.remote.agents_socket).parent, ignore_errors=True)

    async def _watch(self) -> None:
        await self._reader.read()
        self.died.set()
        await asyncio.to_thread(self.child.wait, 1.0)
        logger.error("%s; its open sessions fail, and the next session restarts it", self.failure())

    async def _run_queued(self) -> None:
        while True:
            call = await self._news.get()
            try:
                await call()
            except AgentServerFailed as error:
                logger.warning("%s", error)


class AgentServer:
    """The agent servers of a run, across restarts of their processes."""

    def __init__(self, runtime: RolloutRuntime) -> None:
        self._config, self._pool, self._state = runtime.config, runtime.pool, runtime.state
        self._loop = runtime.loop_thread.loop
        self._where = runtime.router_address
        self.run = ""
        """The identity of this run, under which its turns are journaled."""
        self.journal: TurnJournal | None = None
        """The turns of unfinished sessions, in runs that have a journal."""
        if runtime.journal is not None and self._config.output_dir is not None:
            facts = json.dumps(run_identity(self._config, prompt_files(self._config)), sort_keys=True)
            self.run = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
            self.journal = TurnJournal(Path(self._config.output_dir) / FILE_NAME)
            self.journal.forget_other_runs(self.run)
            runtime.when_recorded.append(partial(self.journal.forget_sample, self.run))
        self._count = server_count(self._config, os.cpu_count() or 1)
        self._warned: set[str] = set()
        self._starting: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._servers: dict[int, RunningServer] = {}
        self._pool.when_changed.append(self._engines_changed)
        self._state.when_updated.append(self._weights_arrived)

    async def running(self, key: str | None = None) -> RunningServer:
        """The process to which the session `key` is pinned, or the first one; starts it if needed."""
        number = 0 if key is None else zlib.crc32(key.encode()) % self._count
        async with self._starting[number]:
            if number in self._servers and self._servers[number].died.is_set():
                await self._servers.pop(number).aclose()
            if number not in self._servers:
                await self._start(number)
            return self._servers[number]

    async def forget(self, opening: Opening) -> None:
        """Delete the journaled turns of a session, which will not be resumed."""
        if self.journal is not None and opening.attempt is not None:
            await self.journal.forget(Attempt(**opening.attempt))

    async def aclose(self) -> None:
        """End the processes; open sessions fail."""
        self._pool.when_changed.remove(self._engines_changed)
        self._state.when_updated.remove(self._weights_arrived)
        for number in range(self._count):
            async with self._starting[number]:
                if number in self._servers:
                    await self._servers.pop(number).aclose()
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)

    async def _start(self, number: int) -> None:
        # The process gets one end of a socket pair, over which the driver sends it its settings.
        folder = tempfile.mkdtemp(prefix="slime-agents-")  # short enough for the path of a socket
        settings = self._settings(folder)
        ours, theirs = socket.socketpair()
        name = NAME if number == 0 else f"{NAME}-{number}"
        child = ChildProcess(
            name,
            [*module_command("slime.agent.server"), "--channel", str(theirs.fileno())],
            env={"TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false")},
            pass_env=self._config.pass_env or (),
            log_path=Path(self._config.output_dir or folder) / "logs" / f"{name}.log",
            pass_fds=(theirs.fileno(),),
            dumps_stacks=True,
        )
        with theirs:
            child.start()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(json.dumps(settings.to_dict()).encode() + b"\n")
            addresses = await self._wait_until_ready(child, reader)
        except BaseException:
            writer.close()
            await asyncio.to_thread(child.stop)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        remote = RemoteServer(addresses, settings.secret)
        if settings.live is not None:
            write_address(Path(self._config.output_dir or folder), remote.url, settings.live.key, remote.model)
        running = self._servers[number] = RunningServer(child, remote, (reader, writer), self._warned)
        # Changes of the weights and the engines during the start are reported now.
        if self._state.weight_version != settings.version:
            running.tell("version", version=self._state.weight_version)
        up = {client.base_url for client in self._pool.up}
        for client in self._pool.roster:
            url, is_new = client.base_url, client.base_url not in settings.engines
            if is_new:
                self._report(running, "added", url)
            if is_new or url not in up:
                self._report(running, "up" if url in up else "down", url)

    async def _wait_until_ready(self, child: ChildProcess, reader: asyncio.StreamReader) -> JsonMapping:
        """Wait for the addresses of a process that was started."""
        limit_s, flag = self._config.engine_start_timeout, "--engine-start-timeout"
        with waiting(NAME, "to be ready", timeout_s=limit_s, flag=flag) as wait:
            try:
                async with asyncio.timeout(wait.remaining()):
                    line = await reader.readline()
            except TimeoutError as error:
                raise AgentServerFailed(f"the agent server was not ready within {limit_s:g} s ({flag})") from error
        if not line:
            await asyncio.to_thread(child.wait, 5.0)
            raise AgentServerFailed(f"the agent server did not start (see {child.log_path}): {child.tail(3)}")
        addresses: JsonMapping = json.loads(line)
        if "error" in addresses:
            raise UserError(addresses["error"])
        return addresses

    def _settings(self, folder: str) -> ServerSettings:
        config = self._config
        assert config.hf_checkpoint is not None, "a run with engines has a model"
        router, router_only, key = self._where
        formats = formats_from_flags(config.carried)
        live = None
        if config.live_judge_path is not None:
            home, params = Path(config.output_dir or folder), self._state.sampling_params
            limits = session_limits(config, params, model_context_length(config.hf_checkpoint), None)
            live = LiveSettings(
                key=load_or_create_key(home),
                store=str((home / LIVE_FILE).absolute()),
                params=dict(params),
                limits=limits.to_dict(),
                template_kwargs=dict(config.apply_chat_template_kwargs or {}),
                strict=config.strict_tokens,
                routing=config.use_rollout_routing_replay,
                filter_path=config.live_filter_path,
                idle_s=config.live_idle_timeout,
                most_conversations=config.live_max_conversations,
            )
        return ServerSettings(
            model=config.hf_checkpoint,
            tool_call_parser=formats.tool,
            reasoning_parser=formats.reasoning,
            engines=tuple(client.base_url for client in self._pool.roster if client.api_key == key),
            folder=folder,
            secret=secrets.token_urlsafe(24),
            trust_remote_code=config.trust_remote_code,
            router=router,
            router_only=router_only,
            engine_key=key,
            engine_timeout_s=float(config.engine_request_timeout),
            fault_tolerant=config.use_fault_tolerance,
            version=self._state.weight_version,
            journal=None if self.journal is None else str(self.journal.path.absolute()),
            host=config.host,
            port=config.agent_server_port or 0,
            live=live,
        )

    def _report(self, server: RunningServer, state: str, what: str) -> None:
        url, reason = "" if state == "given up" else what, what
        key = next((client.api_key for client in self._pool.clients if client.base_url == url), None)
        server.tell("engine", url=url, state=state, reason=reason, key=key)

    def _engines_changed(self, state: str, what: str) -> None:
        for server in self._servers.values():
            self._report(server, state, what)

    def _weights_arrived(self, version: str) -> None:
        """Called by the thread that publishes weights."""

        def tell() -> None:
            for server in self._servers.values():
                server.tell("version", version=version)

        self._loop.call_soon_threadsafe(tell)
