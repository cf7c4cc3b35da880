"""Engine processes of one model: start, health, restart and stop.

Invariant: after `start` returns every engine has answered /health; if one of them cannot, none is left running and the
error has its name, the reason and the end of its log. An engine whose node is lost is started on another node if one is
available, else it is removed from the fleet.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Self

from slime.cluster.local import rollout_slots
from slime.cluster.node import Node, NodeLost, NodeProcess, Slot
from slime.cluster.ports import require_free_port
from slime.cluster.process import ProcessSet
from slime.cluster.watchdog import WaitTimeout, expired, raise_failures, waiting
from slime.config import Config
from slime.engine.fleet.backend import EMBEDDED, choose_backend, installed_sglang
from slime.engine.http.blocking import NoResponse, ask, made_key
from slime.engine.launch import EMBEDDED_PARSERS, EngineSlots, Launch, PortAllocator, embedded_launch
from slime.engine.sglang.installed import InstalledPackage
from slime.engine.sglang.launch import check_server_flags, places, sglang_launch
from slime.engine.sglang.topology import ServedModel, simple_model
from slime.errors import RunFailed, UserError

USER_ERROR_CODE = 2
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_RESTART_GRACE_S = 1.0  # a restarted engine hangs or is dead already

logger = logging.getLogger(__name__)


class EngineDied(RunFailed):
    """An engine process ended unexpectedly."""

    def __init__(self, process: NodeProcess) -> None:
        code, tail = process.poll() or 0, process.tail()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        super().__init__(f"{process.name} {how}; the end of {process.log_path}:\n{tail}")
        self.name, self.exit_code, self.tail = process.name, code, tail


class EngineRetired(Exception):
    """The fleet has removed an engine instead of restarting it, for example because no node is left for it."""


class EngineStartTimeout(WaitTimeout):
    """An engine process runs but did not become healthy in time."""


@dataclass
class _Engine:
    """One engine: its number in the fleet at the start, its slots, and its processes."""

    number: int
    seat: EngineSlots
    launch: Launch
    processes: list[NodeProcess] = field(default_factory=list)

    @property
    def lost(self) -> Node | None:
        """A lost node of this engine; None if all its nodes are available."""
        return next((slot.node for slot in self.seat if slot.node.is_lost), None)


class EngineFleet:
    """The engines of one model, named engine-0, engine-1, ...

    Each engine writes its log to `logs/<name>-<i>.log`. `model` has the groups of SGLang servers; without it there are
    `rollout_num_gpus // rollout_num_gpus_per_engine` identical engines. `slots` are the slots of the whole rollout, a
    part of which belongs to this fleet; without them all engines are on this machine. `key` is the engines' API key;
    `spare` returns a replacement for a slot whose node is lost.
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
        self._ports = PortAllocator()
        self._engines: tuple[_Engine, ...] = ()
        self.size = self._model.num_engines
        if self.size < 1:
            raise UserError(
                f"--rollout-num-gpus {config.rollout_num_gpus} is less than --rollout-num-gpus-per-engine "
                f"{config.rollout_num_gpus_per_engine}: there would be no engine"
            )
        self._installed: InstalledPackage | None = None
        if self.backend == EMBEDDED:
            check_embedded_flags(config, device)
        else:
            self._installed = installed_sglang(config)
            check_server_flags(config, [self._model], self._installed)

    @property
    def launches(self) -> list[Launch]:
        """The current engines, engine-0 first."""
        return [engine.launch for engine in self._engines]

    @property
    def urls(self) -> list[str]:
        """Base URLs of the engines."""
        return [engine.launch.url for engine in self._engines]

    def start(self) -> list[str]:
        """Start all engines and wait until each one is healthy; returns `urls`."""
        slots = rollout_slots(self._config, self._device) if self._slots is None else self._slots
        seats = [tuple(slots[first : first + group.num_gpus_per_engine]) for group, first in places(self._model)]
        ports = fixed_ports(self._config, seats) if self._name == "engine" else []
        self._engines = tuple(
            _Engine(number, seat, self._make_launch(number, seats, seat, ports[number] if ports else None))
            for number, seat in enumerate(seats)
        )
        try:
            for engine in self._engines:
                self._start_engine(engine)
            self._await_health(self._engines)
        except BaseException:
            self.stop()
            raise
        return self.urls

    def check(self, within_s: float = 0.0) -> None:
        """Raise `EngineDied` if an engine has ended or ends within `within_s` seconds: its connections break before the
        process ends."""
        until = time.monotonic() + within_s
        while True:
            for process in self._processes:
                if process.poll() is not None:
                    raise EngineDied(process)
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_S)

    def why_ended(self, index: int) -> str | None:
        """Describe how a process of an engine ended; None while all of them run."""
        engines = self._engines
        if index >= len(engines):
            return "it was removed from the fleet"
        if (node := engines[index].lost) is not None:
            return f"{engines[index].launch.name} has ended: its node ({node.name}) is gone"
        for process in engines[index].processes:
            if process.poll() is not None:
                return str(EngineDied(process))
        return None

    def restart(self, index: int) -> None:
        """Stop the rest of an engine, start it again, and wait until it is healthy: on the same port, or on another
        node if its own is lost. Without another node the engine is removed and `EngineRetired` is raised."""
        engine = self._engines[index]
        while True:
            while engine.processes:
                self._processes.drop(engine.processes.pop(), _RESTART_GRACE_S)
            try:
                if (node := engine.lost) is not None:
                    slots = [self._spare(slot) if self._spare and slot.node.is_lost else slot for slot in engine.seat]
                    seat = tuple(slot for slot in slots if slot is not None)
                    name = engine.launch.name
                    if self._spare is None or len(seat) < len(engine.seat):
                        self._engines = tuple(one for one in self._engines if one is not engine)
                        raise EngineRetired(f"the node ({node.name}) of {name} is gone, and there is no other for it")
                    logger.warning("%s: moves from the lost %s to %s", name, node.name, seat[0].node.name)
                    engine.seat = seat
                    engine.launch = self._make_launch(engine.number, [one.seat for one in self._engines], seat)
                self._start_engine(engine)
                self._await_health([engine])
                return
            except (NodeLost, EngineDied):
                if engine.lost is None:  # else its new node is lost as well: try another one
                    raise

    def stop(self) -> None:
        """Stop all engines. Idempotent."""
        for process in self._processes:
            process.terminate()  # all at once, so that the processes end in parallel
        self._processes.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_launch(
        self, number: int, seats: Sequence[EngineSlots], seat: EngineSlots, port: int | None = None
    ) -> Launch:
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
        whom = ", ".join(engine.launch.name for engine in left)
        with waiting(whom, "to answer /health", timeout_s=limit_s, flag=flag) as wait:
            while left:
                for process in [process for engine in left for process in engine.processes]:
                    if (code := process.poll()) is not None:
                        last = process.tail(1)
                        if code == USER_ERROR_CODE and last.startswith("error: "):
                            raise UserError(last.removeprefix("error: "))
                        raise EngineDied(process)
                left = [engine for engine in left if not _is_healthy(engine.launch)]
                wait.whom = ", ".join(engine.launch.name for engine in left)
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


def fixed_ports(config: Config, seats: Sequence[EngineSlots] | None = None) -> list[int]:
    """The engine ports given by `--engine-port`; empty without the flag. Raises if the port of an engine on this
    machine is in use; without `seats` all engines are on this machine."""
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


def check_embedded_flags(config: Config, device: str) -> None:
    """Refuse flags that the embedded engine does not support."""
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
                f"--{name.replace('_', '-')} {parser}: the embedded engine knows {', '.join(known)}; use one of them, "
                "or --rollout-backend sglang"
            )
    if device == "cuda" and config.rollout_num_gpus_per_engine > 1:
        raise UserError(
            f"--rollout-num-gpus-per-engine {config.rollout_num_gpus_per_engine}: the embedded engine runs on one "
            "GPU; use 1, and set --rollout-num-gpus to the number of engines"
        )


def _is_healthy(launch: Launch) -> bool:
    try:
        return ask("GET", f"{launch.url}/health", timeout_s=_PROBE_TIMEOUT_S)[0] == HTTPStatus.OK
    except NoResponse:
        return False
