"""The engine processes of a run: started together, healthy together, stopped together.

The invariant: after `start` returns every engine has answered /health; if one of them cannot, none is left running and
the error says which one, why, and what its log said last. An engine whose node is lost is started on another one, if
there is one, else it is no part of the fleet any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.cluster.local import rollout_slots
from slime.cluster.node import Node, NodeLost, Process, Slot
from slime.cluster.ports import require_free_port
from slime.cluster.process import ProcessSet
from slime.cluster.watchdog import WaitTimeout, expired, raise_failures, waiting
from slime.config import Config
from slime.engine.fleet.backend import EMBEDDED, choose_backend, installed_sglang
from slime.engine.http.blocking import NoAnswer, ask, made_key
from slime.engine.launch import EMBEDDED_PARSERS, Launch, Ports, Seat, embedded_launch
from slime.engine.sglang.installed import Installed
from slime.engine.sglang.launch import check_server_flags, places, sglang_launch
from slime.engine.sglang.topology import ServedModel, simple_model
from slime.errors import RunFailed, UserError

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


class EngineRetired(Exception):
    """An engine is not started again, and its fleet has dropped it: its node is gone and there is no other, say."""


class EngineStartTimeout(WaitTimeout):
    """An engine process runs but did not become healthy in time."""


@dataclass
class _Engine:
    """One engine: its number among those that the fleet began with, where it sits, and what runs."""

    number: int
    seat: Seat
    launch: Launch
    processes: list[Process] = field(default_factory=list)

    @property
    def lost(self) -> Node | None:
        """One of its nodes that is gone."""
        return next((slot.node for slot in self.seat if slot.node.is_lost), None)


class EngineFleet:
    """The engines of one model, named engine-0, engine-1, ...

    Each writes its log to `logs/<name>-<i>.log`. `model` says which groups of SGLang servers it has; without one it is
    `rollout_num_gpus // rollout_num_gpus_per_engine` engines alike. `slots` are the places of the whole rollout, of
    which the engines take theirs; without them all are on this machine. `key` is what they ask for, `spare` finds
    another slot in the place of one whose node is lost.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        run_dir: str | os.PathLike[str],
        model_path: str | os.PathLike[str],
        name: str = "engine",
        launcher: Sequence[str] = (),
        model: ServedModel | None = None,
        slots: Sequence[Slot] | None = None,
        key: str | None = None,
        spare: Callable[[Slot], Slot | None] | None = None,
    ) -> None:
        self.backend, reason = choose_backend(config, device)
        logger.info("%s engines: %s", self.backend, reason)
        self._config = config
        self._device = device
        self._logs = Path(run_dir) / "logs"
        self._model = model or simple_model(config, os.fspath(model_path))
        self._name = name
        self._launcher = tuple(launcher)
        self._slots = slots
        self.key = key or made_key()
        self._processes = ProcessSet()
        self._spare = spare
        self._ports = Ports()
        self._engines: tuple[_Engine, ...] = ()
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
    def launches(self) -> list[Launch]:
        """The engines that are there, engine-0 first."""
        return [engine.launch for engine in self._engines]

    @property
    def urls(self) -> list[str]:
        """Their base URLs."""
        return [engine.launch.url for engine in self._engines]

    def start(self) -> list[str]:
        """Start all engines and wait until each one is healthy; returns `urls`."""
        self._engines = self._make_engines()
        try:
            for engine in self._engines:
                self._start_engine(engine)
            self._await_health(self._engines)
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
        """How one of an engine's processes ended; None while they run."""
        engines = self._engines
        if index >= len(engines):
            return "it is no part of the fleet any more"
        if (node := engines[index].lost) is not None:
            return f"{engines[index].launch.name} has ended: its node ({node.name}) is gone"
        for process in engines[index].processes:
            if (code := process.poll()) is not None:
                return str(EngineDied(process.name, code, process.tail(), process.log_path))
        return None

    def restart(self, index: int) -> None:
        """End what is left of one engine, start it again, and wait until it is healthy: on its port, or on another node
        where its own is lost. Without another one it leaves the fleet, and `EngineRetired` says so."""
        engine = self._engines[index]
        while True:
            while engine.processes:
                self._processes.drop(engine.processes.pop(), _RESTART_GRACE_S)
            try:
                if (node := engine.lost) is not None:
                    self._move(engine, node)
                self._start_engine(engine)
                self._await_health([engine])
                return
            except (NodeLost, EngineDied):
                if engine.lost is None:  # or its next node is gone as well, and there may be another
                    raise

    def _move(self, engine: _Engine, lost: Node) -> None:
        """Another place for an engine whose node is lost."""
        found = [self._spare(slot) if self._spare and slot.node.is_lost else slot for slot in engine.seat]
        seat = tuple(slot for slot in found if slot is not None)
        if self._spare is None or len(seat) < len(engine.seat):
            self._engines = tuple(one for one in self._engines if one is not engine)
            raise EngineRetired(f"the node ({lost.name}) of {engine.launch.name} is gone, and there is no other for it")
        logger.warning("%s goes from %s, which is gone, to %s", engine.launch.name, lost.name, seat[0].node.name)
        engine.seat = seat
        engine.launch = self._make_launch(engine.number, [one.seat for one in self._engines], seat)

    def pids(self) -> list[int]:
        """All processes the engines consist of."""
        return [pid for process in self._processes for pid in process.pids()]

    def stop(self) -> None:
        """Stop all engines. Safe to call again."""
        for process in self._processes:
            process.terminate()  # all at once: the last of many would otherwise wait for each of the others
        self._processes.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _make_engines(self) -> tuple[_Engine, ...]:
        seats = self._seats()
        asked = fixed_ports(self._config, seats) if self._name == "engine" else []
        return tuple(
            _Engine(number, seat, self._make_launch(number, seats, seat, asked[number] if asked else None))
            for number, seat in enumerate(seats)
        )

    def _make_launch(self, number: int, seats: Sequence[Seat], seat: Seat, port: int | None = None) -> Launch:
        config, name = self._config, f"{self._name}-{number}"
        if self._installed is None:
            return embedded_launch(
                config,
                name,
                seat,
                self._ports.take(seat[0].node, 1)[0] if port is None else port,
                seats=seats,
                device=self._device,
                model_path=self._model.model_path,
                launcher=self._launcher,
                key=self.key,
            )
        return sglang_launch(
            config,
            name,
            seat,
            self._ports,
            list(places(self._model))[number],
            seats=seats,
            device=self._device,
            model=self._model,
            installed=self._installed,
            http_port=port,
            key=self.key,
        )

    def _seats(self) -> list[Seat]:
        """The slots of each engine."""
        slots = rollout_slots(self._config, self._device) if self._slots is None else self._slots
        return [tuple(slots[first : first + group.num_gpus_per_engine]) for group, first in places(self._model)]

    def _start_engine(self, engine: _Engine) -> None:
        for node, command in engine.launch.starts:
            try:
                process = node.start(command, self._logs / f"{command.name}.log")
            except NodeLost as lost:
                raise NodeLost(f"{command.name} cannot be started: {lost}") from lost
            engine.processes.append(self._processes.keep(process))

    def _await_health(self, engines: Sequence[_Engine]) -> None:
        limit_s, flag = self._config.engine_start_timeout, "--engine-start-timeout"
        left = list(engines)
        with waiting(_names(left), "to answer /health", timeout_s=limit_s, flag=flag) as wait:
            while left:
                for engine in left:
                    for process in engine.processes:
                        _raise_if_ended(process)
                left = [engine for engine in left if not _is_healthy(engine.launch)]
                wait.whom = _names(left)
                if left and wait.is_over():
                    launch, process = left[0].launch, left[0].processes[0]
                    raise expired(
                        wait,
                        EngineStartTimeout,
                        f"{launch.name} did not answer /health at {launch.url} within {limit_s:g} s ({flag}); "
                        f"the end of {process.log_path}:\n{process.tail()}",
                    )
                raise_failures()
                if left:
                    time.sleep(_POLL_S)


def _names(engines: Sequence[_Engine]) -> str:
    return ", ".join(engine.launch.name for engine in engines)


def fixed_ports(config: Config, seats: Sequence[Seat] | None = None) -> list[int]:
    """The ports that `--engine-port` asks for, none without that flag; each is free at the moment on this machine, as
    far as the engines (`seats`) are here. Without seats all are."""
    first = config.engine_port
    if first is None or config.rollout_external_engine_addrs:
        return []
    if seats is None:
        hosts: list[str | None] = [config.host] * (config.rollout_num_gpus // config.rollout_num_gpus_per_engine)
    else:
        hosts = [seat[0].node.address if seat[0].node.is_here else None for seat in seats]
    for port, host in enumerate(hosts, first):
        if host is not None:
            require_free_port(port, host, flag="--engine-port")
    return list(range(first, first + len(hosts)))


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


def _is_healthy(launch: Launch) -> bool:
    try:
        return ask("GET", f"{launch.url}/health", timeout_s=_PROBE_TIMEOUT_S)[0] == HTTPStatus.OK
    except NoAnswer:
        return False


def _raise_if_ended(process: Process) -> None:
    code = process.poll()
    if code is None:
        return
    last = process.tail(1)
    if code == USER_ERROR_CODE and last.startswith("error: "):
        raise UserError(last.removeprefix("error: "))
    raise EngineDied(process.name, code, process.tail(), process.log_path)
