"""The engine processes of a run: started together, healthy together, stopped together.

The invariant: after `start` returns every engine has answered /health; if one of them cannot, none is left running and
the error says which one, why, and what its log said last.
"""

from __future__ import annotations

import http.client
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.cluster.devices import resolve_rollout_dtype, threads_per_process, visible_gpus
from slime.cluster.ports import free_ports, require_free_port
from slime.cluster.process import ChildProcess, ProcessSet
from slime.config import Config
from slime.engine.sglang import choose_backend
from slime.errors import RunFailed, UserError

EMBEDDED_ENGINE = (sys.executable, "-m", "slime.engine.embedded")
USER_ERROR_CODE = 2
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class EngineDied(RunFailed):
    """An engine process ended although nobody stopped it."""

    def __init__(self, name: str, exit_code: int, tail: str, log_path: Path) -> None:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
        super().__init__(f"{name} {how}; the end of {log_path}:\n{tail}")
        self.name = name
        self.exit_code = exit_code
        self.tail = tail


class EngineStartTimeout(RunFailed):
    """An engine process runs but did not become healthy in time."""


class EngineFleet:
    """`rollout_num_gpus // rollout_num_gpus_per_engine` engines on this machine, named engine-0, engine-1, ...

    Each writes its log to `logs/<name>-<i>.log`.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        run_dir: str | os.PathLike[str],
        model_path: str | os.PathLike[str],
        name: str = "engine",
        launcher: Sequence[str] = EMBEDDED_ENGINE,
    ) -> None:
        _, reason = choose_backend(config.rollout_backend)
        logger.info("embedded engines: %s", reason)
        self._config = config
        self._device = device
        self._logs = Path(run_dir) / "logs"
        self._model_path = os.fspath(model_path)
        self._name = name
        self._launcher = list(launcher)
        self._processes = ProcessSet()
        self._ports: list[int] = []
        self.size = config.rollout_num_gpus // config.rollout_num_gpus_per_engine
        if self.size < 1:
            raise UserError(
                f"--rollout-num-gpus {config.rollout_num_gpus} is less than --rollout-num-gpus-per-engine "
                f"{config.rollout_num_gpus_per_engine}: there would be no engine"
            )
        if device == "cuda" and config.rollout_num_gpus_per_engine > 1:
            raise UserError(
                f"--rollout-num-gpus-per-engine {config.rollout_num_gpus_per_engine}: the embedded engine runs on one "
                "GPU, use 1 and let --rollout-num-gpus count the engines"
            )

    @property
    def urls(self) -> list[str]:
        """The base URLs, engine-0 first."""
        host = _client_host(self._config.host)
        return [f"http://{host}:{port}" for port in self._ports]

    def start(self) -> list[str]:
        """Start all engines and wait until each one is healthy; returns `urls`."""
        self._ports = self._choose_ports()
        try:
            for index in range(self.size):
                self._processes.start(self._engine(index))
            self._await_health()
        except BaseException:
            self.stop()
            raise
        return self.urls

    def check(self) -> None:
        """Raise `EngineDied` if an engine has ended."""
        for process in self._processes:
            if (code := process.poll()) is not None:
                raise EngineDied(process.name, code, process.tail(), process.log_path)

    def pids(self) -> list[int]:
        """All processes the engines consist of."""
        return [pid for process in self._processes for pid in process.pids()]

    def stop(self) -> None:
        """Stop all engines. Safe to call again."""
        self._processes.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _choose_ports(self) -> list[int]:
        return fixed_ports(self._config) or free_ports(self.size, self._config.host)

    def _engine(self, index: int) -> ChildProcess:
        name = f"{self._name}-{index}"
        return ChildProcess(name, self._argv(index), env=self._env(index), log_path=self._logs / f"{name}.log")

    def _argv(self, index: int) -> list[str]:
        config = self._config
        dtype = resolve_rollout_dtype(config.rollout_dtype, config.dtype, self._device)
        argv = [*self._launcher, "--model-path", self._model_path, "--host", config.host]
        argv += ["--port", str(self._ports[index]), "--device", self._device, "--dtype", dtype]
        argv += ["--max-running-requests", str(config.engine_max_running_requests)]
        if config.engine_max_total_tokens is not None:
            argv += ["--max-total-tokens", str(config.engine_max_total_tokens)]
        argv += ["--chunked-prefill-size", str(config.engine_chunked_prefill_size)]
        argv += ["--mem-fraction", str(config.engine_mem_fraction)]
        argv += ["--log-level", config.log_level]
        if config.rollout_compile is not None:
            argv.append("--compile" if config.rollout_compile else "--no-compile")
        return [*argv, "--trust-remote-code"] if config.trust_remote_code else argv

    def _env(self, index: int) -> dict[str, str]:
        if self._device != "cuda":
            return threads_per_process(self.size)
        trainers = self._config.actor_num_nodes * self._config.actor_num_gpus_per_node
        return {"CUDA_VISIBLE_DEVICES": visible_gpus([index if self._config.colocate else trainers + index])}

    def _await_health(self) -> None:
        deadline = time.monotonic() + self._config.engine_start_timeout
        waiting = list(zip(self._processes, self._ports, strict=True))
        while waiting:
            for process, _ in waiting:
                _raise_if_ended(process)
            waiting = [(process, port) for process, port in waiting if not self._is_healthy(port)]
            if waiting and time.monotonic() >= deadline:
                process, port = waiting[0]
                raise EngineStartTimeout(
                    f"{process.name} did not answer /health on port {port} within {self._config.engine_start_timeout:g}"
                    f" s (--engine-start-timeout); the end of {process.log_path}:\n{process.tail()}"
                )
            if waiting:
                time.sleep(_POLL_S)

    def _is_healthy(self, port: int) -> bool:
        connection = http.client.HTTPConnection(_client_host(self._config.host), port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def fixed_ports(config: Config) -> list[int]:
    """The ports that `--engine-port` asks for, each one free at the moment; none without that flag."""
    first = config.engine_port
    if first is None:
        return []
    ports = range(first, first + config.rollout_num_gpus // config.rollout_num_gpus_per_engine)
    return [require_free_port(port, config.host, flag="--engine-port") for port in ports]


def _client_host(host: str) -> str:
    """The address to reach a server that binds to `host`: a wildcard is reached over loopback."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _raise_if_ended(process: ChildProcess) -> None:
    code = process.poll()
    if code is None:
        return
    last = process.tail(1)
    if code == USER_ERROR_CODE and last.startswith("error: "):
        raise UserError(last.removeprefix("error: "))
    raise EngineDied(process.name, code, process.tail(), process.log_path)
