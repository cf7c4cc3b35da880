"""Supervises the agent server of a run: starts it for the first session, watches it, and restarts it after it died.

Invariants: the process ends with the driver, however that ends. Every change of engines and weights that the driver
sees is reported to the process, in the same order.
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
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from slime.agent.conversation import session_limits
from slime.agent.interaction import FILE_NAME as LIVE_FILE
from slime.agent.server.control_client import AgentServerFailed, RemoteServer
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
from slime.config.datasets import prompt_files
from slime.data.buffer import run_identity
from slime.data.chat_template import model_context_length
from slime.errors import UserError
from slime.models.parsers.formats import formats_from_flags
from slime.rollout.runtime import RolloutRuntime

NAME = "agent-server"

logger = logging.getLogger(__name__)


class RunningServer:
    """One running agent server process; `died` is set when it has ended."""

    def __init__(self, child: ChildProcess, remote: RemoteServer, reader: asyncio.StreamReader) -> None:
        self.child, self.remote = child, remote
        self.died = asyncio.Event()
        self._warned: set[str] = set()
        self._reader = reader
        self._news: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._run_queued())]

    def tell(self, call: Callable[[], Awaitable[None]]) -> None:
        """Queue a call; calls run one after the other, in order."""
        self._news.put_nowait(call)

    def warn(self, warning: str | None) -> None:
        """Log a warning of the process in the driver, once."""
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            logger.warning("%s: %s", NAME, warning)

    def failure(self) -> AgentServerFailed:
        """The error for sessions of a process that died."""
        code = self.child.poll()
        return AgentServerFailed(f"the agent server died (exit code {code}, see {self.child.log_path})")

    async def aclose(self, channel: asyncio.StreamWriter) -> None:
        """End the process and all processes it started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.remote.aclose()
        channel.close()
        await asyncio.to_thread(self.child.stop)

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
    """The agent server of a run, across restarts of its process."""

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
        self._starting = asyncio.Lock()
        self._running: tuple[RunningServer, asyncio.StreamWriter, str] | None = None
        self._pool.when_changed.append(self._engines_changed)
        self._state.when_updated.append(self._weights_arrived)

    async def running(self) -> RunningServer:
        """The running process; starts it if needed."""
        async with self._starting:
            if self._running is not None and self._running[0].died.is_set():
                await self._end()
            if self._running is None:
                await self._start()
            assert self._running is not None
            return self._running[0]

    async def forget(self, opening: Opening) -> None:
        """Delete the journaled turns of a session, which will not be resumed."""
        if self.journal is not None and opening.attempt is not None:
            await self.journal.forget(Attempt(**opening.attempt))

    async def aclose(self) -> None:
        """End the process; open sessions fail."""
        self._pool.when_changed.remove(self._engines_changed)
        self._state.when_updated.remove(self._weights_arrived)
        async with self._starting:
            await self._end()
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)

    async def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="slime-agents-")  # short enough for the path of a socket
        settings = self._settings(folder)
        ours, theirs = socket.socketpair()
        logs = Path(self._config.output_dir or folder) / "logs"
        child = ChildProcess(
            NAME,
            [*module_command("slime.agent.server"), "--channel", str(theirs.fileno())],
            env={"TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false")},
            pass_env=self._config.pass_env or (),
            log_path=logs / f"{NAME}.log",
            pass_fds=(theirs.fileno(),),
            dumps_stacks=True,
        )
        with theirs:
            child.start()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            remote = await self._wait_until_ready(settings, child, reader, writer)
        except BaseException:
            writer.close()
            await asyncio.to_thread(child.stop)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if settings.live is not None:
            write_address(Path(self._config.output_dir or folder), remote.url, settings.live.key, remote.model)
        running = RunningServer(child, remote, reader)
        self._running = running, writer, folder
        up = {client.base_url for client in self._pool.up}
        for client in self._pool.roster:
            url, is_new = client.base_url, client.base_url not in settings.engines
            if is_new:
                self._engines_changed("added", url)
            if is_new or url not in up:
                self._engines_changed("up" if url in up else "down", url)

    async def _wait_until_ready(
        self,
        settings: ServerSettings,
        child: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> RemoteServer:
        limit_s, flag = self._config.engine_start_timeout, "--engine-start-timeout"
        writer.write(json.dumps(settings.to_dict()).encode() + b"\n")
        with waiting(NAME, "to be ready", timeout_s=limit_s, flag=flag) as wait:
            try:
                async with asyncio.timeout(wait.remaining()):
                    line = await reader.readline()
            except TimeoutError as error:
                raise AgentServerFailed(f"the agent server was not ready within {limit_s:g} s ({flag})") from error
        if not line:
            await asyncio.to_thread(child.wait, 5.0)
            raise AgentServerFailed(f"the agent server did not start (see {child.log_path}): {child.tail(3)}")
        addresses = json.loads(line)
        if "error" in addresses:
            raise UserError(addresses["error"])
        return RemoteServer(addresses, settings.secret)

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

    async def _end(self) -> None:
        if self._running is not None:
            (running, writer, folder), self._running = self._running, None
            await running.aclose(writer)
            shutil.rmtree(folder, ignore_errors=True)

    def _engines_changed(self, state: str, what: str) -> None:
        if self._running is not None:
            running, url, reason = self._running[0], "" if state == "given up" else what, what
            key = next((client.api_key for client in self._pool.clients if client.base_url == url), None)
            running.tell(lambda: running.remote.engine(url, state, reason, key))

    def _weights_arrived(self, version: str) -> None:
        """Called by the thread that publishes weights."""

        def tell() -> None:
            if self._running is not None:
                running = self._running[0]
                running.tell(lambda: running.remote.version(version))

        self._loop.call_soon_threadsafe(tell)
