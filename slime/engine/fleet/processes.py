"""The engine processes of a run: started together, healthy together, stopped together.

The invariant: after `start` returns every engine has answered /health; if one of them cannot, none is left running and
the error says which one, why, and what its log said last.
"""

from __future__ import annotations

import http.client
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.cluster.node import Slot
from slime.cluster.ports import free_ports, require_free_port
from slime.cluster.process import ChildProcess, ProcessSet
from slime.config import Config
from slime.engine.fleet.backend import EMBEDDED, choose_backend, installed_sglang
from slime.engine.launch import EMBEDDED_ENGINE, EMBEDDED_PARSERS, Launch, client_host, embedded_launches
from slime.engine.sglang.installed import Installed
from slime.engine.sglang.launch import PORTS_PER_ENGINE, check_server_flags, sglang_launches
from slime.engine.sglang.topology import ServedModel, simple_model
from slime.errors import RunFailed, UserError
from slime.waits import WaitTimeout, expired, raise_failures, waiting

USER_ERROR_CODE = 2
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_RESTART_GRACE_S = 1.0  # an engine that is restarted is hung or dead already

logger = logging.getLogger(__name__)


class EngineDied(RunFailed):
    """An engine process ended although nobody stopped it."""

    def __init__(self, name: str, exit_code: int, tail: str, log_path: Path) -> None:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
        super().__init__(f"{name} {how}; the end of {log_path}:\n{tail}")
        self.name = name
        self.exit_code = exit_code
        self.tail = tail


class EngineStartTimeout(WaitTimeout):
    """An engine process runs but did not become healthy in time."""


class EngineFleet:
    """The engines of one model on this machine, named engine-0, engine-1, ...

    Each writes its log to `logs/<name>-<i>.log`. `model` says which groups of SGLang servers it has; without one it is
    `rollout_num_gpus // rollout_num_gpus_per_engine` engines alike.
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
        model: ServedModel | None = None,
        slots: Sequence[Slot] | None = None,
    ) -> None:
        self.backend, reason = choose_backend(config, device)
        logger.info("%s engines: %s", self.backend, reason)
        self._config = config
        self._device = device
        self._slots = slots
        self._logs = Path(run_dir) / "logs"
        self._model = model or simple_model(config, os.fspath(model_path))
        self._name = name
        self._launcher = tuple(launcher)
        self._processes = ProcessSet()
        self.launches: list[Launch] = []
        self.size = self._model.num_engines
        if self.size < 1:
            raise UserError(
                f"--rollout-num-gpus {config.rollout_num_gpus} is less than --rollout-num-gpus-per-engine "
                f"{config.rollout_num_gpus_per_engine}: there would be no engine"
            )
        self._installed: Installed | None = None
        if self.backend == EMBEDDED:
            refuse_for_embedded(config, device)
        else:
            self._installed = installed_sglang(config)
            check_server_flags(config, [self._model], self._installed)

    @property
    def urls(self) -> list[str]:
        """The base URLs, engine-0 first."""
        return [launch.url for launch in self.launches]

    def start(self) -> list[str]:
        """Start all engines and wait until each one is healthy; returns `urls`."""
        self.launches = self._make_launches()
        try:
            for launch in self.launches:
                self._processes.start(self._process(launch))
            self._await_health([(p, launch.port) for p, launch in zip(self._processes, self.launches, strict=True)])
        except BaseException:
            self.stop()
            raise
        return self.urls

    def check(self, within_s: float = 0.0) -> None:
        """Raise `EngineDied` if an engine has ended, or does so `within_s`: its connections break before it is gone."""
        until = time.monotonic() + within_s
        while True:
            for process in self._processes:
                if (code := process.poll()) is not None:
                    raise EngineDied(process.name, code, process.tail(), process.log_path)
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_S)

    def why_ended(self, index: int) -> str | None:
        """How one engine's process ended; None while it runs."""
        process = list(self._processes)[index]
        code = process.poll()
        return None if code is None else str(EngineDied(process.name, code, process.tail(), process.log_path))

    def restart(self, index: int) -> None:
        """End what is left of one engine, start it again on its port, and wait until it is healthy."""
        process = self._processes.replace(index, self._process(self.launches[index]), _RESTART_GRACE_S)
        self._await_health([(process, self.launches[index].port)])

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

    def _make_launches(self) -> list[Launch]:
        config = self._config
        http = fixed_ports(config, self.size) if self._name == "engine" else []
        if self._installed is None:
            ports = http or free_ports(self.size, config.host)
            return embedded_launches(
                config,
                ports,
                device=self._device,
                model_path=self._model.model_path,
                name=self._name,
                launcher=self._launcher,
            )
        ports = free_ports(self.size * PORTS_PER_ENGINE, config.host)
        ports[::PORTS_PER_ENGINE] = http or ports[::PORTS_PER_ENGINE]
        return sglang_launches(
            config, ports, device=self._device, model=self._model, name=self._name, installed=self._installed
        )

    def _process(self, launch: Launch) -> ChildProcess:
        return ChildProcess(
            launch.name,
            launch.argv,
            env=launch.env,
            pass_env=self._config.pass_env or (),
            log_path=self._logs / f"{launch.name}.log",
            dumps_stacks=launch.argv[: len(EMBEDDED_ENGINE)] == EMBEDDED_ENGINE,  # SGLang's servers die of SIGQUIT
            also=(launch.url,),
        )

    def _await_health(self, started: list[tuple[ChildProcess, int]]) -> None:
        limit_s, flag = self._config.engine_start_timeout, "--engine-start-timeout"
        names = ", ".join(process.name for process, _ in started)
        with waiting(names, "to answer /health", timeout_s=limit_s, flag=flag) as wait:
            while started:
                for process, _ in started:
                    _raise_if_ended(process)
                started = [(process, port) for process, port in started if not self._is_healthy(port)]
                wait.whom = ", ".join(process.name for process, _ in started)
                if started and wait.is_over():
                    process, port = started[0]
                    raise expired(
                        wait,
                        EngineStartTimeout,
                        f"{process.name} did not answer /health on port {port} within {limit_s:g} s ({flag}); "
                        f"the end of {process.log_path}:\n{process.tail()}",
                    )
                raise_failures()
                if started:
                    time.sleep(_POLL_S)

    def _is_healthy(self, port: int) -> bool:
        connection = http.client.HTTPConnection(client_host(self._config.host), port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def fixed_ports(config: Config, count: int | None = None) -> list[int]:
    """The ports that `--engine-port` asks for, each one free at the moment; none without that flag."""
    first = config.engine_port
    if first is None or config.rollout_external_engine_addrs:
        return []
    count = config.rollout_num_gpus // config.rollout_num_gpus_per_engine if count is None else count
    return [require_free_port(port, config.host, flag="--engine-port") for port in range(first, first + count)]


def refuse_for_embedded(config: Config, device: str) -> None:
    """What only SGLang can do."""
    for flag, value in (
        ("--sglang-config", config.sglang_config),
        ("--prefill-num-servers", config.prefill_num_servers),
    ):
        if value is not None:
            raise UserError(
                f"{flag} is about SGLang servers, but the embedded engine was chosen: use --rollout-backend sglang"
            )
    for name, known in EMBEDDED_PARSERS.items():
        parser = config.carried.get(name)
        if parser is not None and parser not in known:
            raise UserError(
                f"--{name.replace('_', '-')} {parser}: the embedded engine knows {', '.join(known)}; choose one of "
                "them, or use --rollout-backend sglang"
            )
    if device == "cuda" and config.rollout_num_gpus_per_engine > 1:
        raise UserError(
            f"--rollout-num-gpus-per-engine {config.rollout_num_gpus_per_engine}: the embedded engine runs on one "
            "GPU, use 1 and let --rollout-num-gpus count the engines"
        )


def _raise_if_ended(process: ChildProcess) -> None:
    code = process.poll()
    if code is None:
        return
    last = process.tail(1)
    if code == USER_ERROR_CODE and last.startswith("error: "):
        raise UserError(last.removeprefix("error: "))
    raise EngineDied(process.name, code, process.tail(), process.log_path)
