"""The components of a run: engines, trainers, rollout runtime, weight publisher, supervisors.

Invariant: all components are up when the constructor returns, or none is left; `stack` stops them in the reverse order
of their start. Engines are restarted only by a supervisor, and never while their weights are being replaced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

from slime.cluster.child_env import is_secret
from slime.cluster.factory import open_cluster
from slime.cluster.node import SlotPlacement
from slime.config import Config
from slime.config.algorithm import serves_teacher
from slime.config.batch import num_trainers
from slime.config.initial_weights import model_folders
from slime.driver.plan.plan import choose_rollout_backend, needs_engines, precisions
from slime.engine.elastic.fleet_cli import fleet_rows
from slime.engine.elastic.handshake import fleet_token, joined_engine_key
from slime.engine.elastic.members import JoinedEngines
from slime.engine.elastic.registration import RegistrationServer
from slime.engine.fleet.engines import Engines, single_engine_config
from slime.engine.fleet.processes import EngineFleet
from slime.engine.fleet.status import EngineLoad, EngineStates, request_load
from slime.engine.fleet.supervisor import HealthCheckSettings, Supervisor
from slime.engine.http.errors import EngineError, EngineProtocolError
from slime.engine.http.pool import EnginePool
from slime.errors import RunFailed, UserError
from slime.models.shape import count_parameters
from slime.observability.progress import Progress
from slime.observability.run_dir import RunDir
from slime.rollout.rewards.remote import Teacher
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import generate_and_rm_group
from slime.storage.json_types import JsonObject
from slime.train.node_paths import code_folders, files_to_provide, folders_written
from slime.train.trainer_group import TrainerGroup
from slime.weights.publisher import PublishResult, WeightPublisher, WeightVersionMismatch
from slime.weights.transport import check_weights_folder, make_publisher, with_delta_checksum

Status = Callable[[str, str], None]
Refresh = Callable[[str], bool] | None
Route = Callable[[str, bool], None] | None

logger = logging.getLogger(__name__)


class RunComponents:
    """The processes of a run and their connections; `start` is the first rollout to train on."""

    def __init__(
        self,
        config: Config,
        device: str,
        run_dir: RunDir,
        stack: ExitStack,
        *,
        reward: Callable[..., object] | None,
        progress: Progress,
    ) -> None:
        self.config = config
        self._device = device
        self._run_dir = run_dir
        self._version: int | None = None
        self._began = time.time()
        self._trainers_busy = threading.Lock()
        self.cluster = open_cluster(config, device, **places(config))
        stack.callback(self.cluster.close)
        self.config = config = with_fault_tolerance_across_nodes(config, self.cluster.placement)
        self._bring_files()
        if needs_engines(config):
            backend, _ = choose_rollout_backend(config, device)
            self.config = config = with_delta_checksum(config, device, backend)
        self.engines, self.teacher_engine = self._make_engines(stack)
        self.trainers: TrainerGroup | None = None
        if not config.debug_rollout_only:
            placement = self.cluster.placement
            self.trainers = TrainerGroup(config, device=device, run_dir=run_dir.path, placement=placement)
            stack.callback(self.trainers.stop)
            progress.watch("trainer", self.trainers.doing)
        self.start = self._start_processes(progress.status)
        if self.engines is not None:
            self.config = self.engines.supported_config(config)
        urls, where = (self.engines.urls, self.engines.addresses()) if self.engines is not None else ([], {})
        self.runtime = stack.enter_context(
            RolloutRuntime(self.config, urls, dispatch=generate_and_rm_group, reward=reward, **where)
        )
        if reward is not None:
            self.runtime.state.rewardless = False
        if self.trainers is not None:
            self.runtime.keep = self.trainers.keep
        self._make_teacher(stack)
        self.joined = self._make_joined(stack)
        self.publisher = self._make_publisher(stack)
        self.supervisors = self._make_supervisors(stack)
        if self.joined is not None:
            assert self.config.fleet_address is not None
            assert self.config.hf_checkpoint is not None
            staged_in = None if self.publisher is None else self.publisher.staged_in
            door = RegistrationServer(
                self.config.fleet_address, run_dir.path, self.joined, model=self.config.hf_checkpoint,
                staged_in=staged_in, rows=self.fleet,
            )  # fmt: skip
            stack.push(lambda kind, error, trace: door.close(goodbye=kind is None))
            progress.message(f"more engines may join: {door.invitation}")

    # construction

    def _bring_files(self) -> None:
        """Copy the files that engines and trainers read to their nodes; check that folders to be written are shared."""
        config, cluster = self.config, self.cluster
        if cluster.placement.is_here:
            return
        folders = [] if config.debug_rollout_only else files_to_provide(config)
        cluster.provide([*folders, *model_folders(config).values()])
        cluster.provide_code(code_folders(config))
        trainers = tuple(dict.fromkeys(slot.node for slot in cluster.placement.trainers))
        for flag, folder in folders_written(config).items():
            if missing_on := cluster.nodes_without(folder, trainers):
                raise UserError(
                    f"{flag} {folder} is not the same folder on the node {missing_on[0]}, whose trainers write there: "
                    "give a folder on a file system that all nodes share"
                )
        if needs_engines(config) and not config.debug_rollout_only:
            check_weights_folder(config, cluster, self._run_dir)

    def _make_engines(self, stack: ExitStack) -> tuple[Engines | None, EngineFleet | None]:
        """Create the engines that are updated (with those of frozen models), and the one that serves a teacher."""
        config = self.config
        if not needs_engines(config):
            return None, None
        alone = config.replace(colocate=True) if config.debug_rollout_only else config  # GPUs from the first one on
        slots = self.cluster.placement.rollout
        spare = self.cluster.spare
        engines = Engines(alone, device=self._device, run_dir=self._run_dir, slots=slots, spare=spare)
        stack.callback(engines.stop)
        if not serves_teacher(config):
            return engines, None
        assert config.opd_teacher_load is not None
        teacher = EngineFleet(
            single_engine_config(alone),
            device=self._device,
            run_dir=self._run_dir,
            model_path=config.opd_teacher_load,
            name="teacher",
            slots=slots[:1],
            spare=spare,
        )
        stack.callback(teacher.stop)
        return engines, teacher

    def _start_processes(self, status: Status) -> int:
        """Start engines and trainers concurrently and return the first rollout; raise the first failure of either."""
        withheld = sorted(name for name in os.environ if is_secret(name) and name not in (self.config.pass_env or ()))
        if withheld:
            logger.info("engines and trainers do not get %s of the environment (--pass-env)", ", ".join(withheld))
        fleets: list[Engines | EngineFleet] = [one for one in (self.engines, self.teacher_engine) if one is not None]
        training, rollout = precisions(self.config, self._device, count_parameters(self.config.hf_checkpoint))
        if self.trainers is not None:
            status("trainer", f"starting {self.trainers.world_size} process(es) on {self._device} in {training}")
        if fleets:
            count = sum(fleet.size for fleet in fleets)
            status("engine", f"starting {count} process(es) on {self._device} in {rollout}")
        with ThreadPoolExecutor(2) as pool:
            starting = [pool.submit(fleet.start) for fleet in fleets]
            try:
                start = self.trainers.start() if self.trainers is not None else 0
                if self.trainers is not None:
                    status("trainer", "ready")
                for one in starting:
                    one.result()
                if fleets:
                    status("engine", "ready")
            except BaseException:
                for fleet in fleets:
                    fleet.stop()  # otherwise leaving the pool would wait until the engines are up
                raise
        return start if self.config.start_rollout_id is None else self.config.start_rollout_id

    def _make_teacher(self, stack: ExitStack) -> None:
        config, own = self.config, self.teacher_engine
        if not config.use_opd or config.opd_type != "engine" or self.engines is None:
            return
        url, key = (own.urls[0], own.key) if own is not None else (config.rm_url, None)
        assert url is not None, "the config's checks make sure that a teacher is named"
        timeout_s, concurrency = config.engine_request_timeout, config.sglang_server_concurrency
        teacher = Teacher.at(url, timeout_s=timeout_s, concurrency=concurrency, api_key=key)
        self.runtime.state.teacher = teacher
        stack.callback(lambda: self.runtime.run(teacher.aclose()))

    def _make_publisher(self, stack: ExitStack) -> WeightPublisher | None:
        if self.engines is None or self.trainers is None:
            return None
        mode = self.config.update_weight_pause_mode
        if mode != "abort" and self.engines.kind == "sglang":
            logger.warning(
                "--update-weight-pause-mode %s: SGLang keeps sharing prefixes that earlier weights computed, such as a "
                "system prompt; abort recomputes them, and requests are continued in both cases",
                mode,
            )
        publisher = make_publisher(
            self.config,
            device=self._device,
            run_dir=self._run_dir.path,
            source=self.trainers.processes,
            clients=self.runtime.pool.roster,
            run_async=self.runtime.run,
            engine_kind=self.engines.kind,
            placement=self.cluster.placement,
            delivery=self.joined,
        )
        stack.callback(publisher.close)
        return publisher

    def _make_joined(self, stack: ExitStack) -> JoinedEngines | None:
        if self.config.fleet_address is None or self.engines is None:
            return None
        joined = JoinedEngines(
            self.config,
            device=self._device,
            kind=self.engines.kind,
            pool=self.runtime.pool,
            run_async=self.runtime.run,
            watch=self._watch(),
            refresh=self._refresh if self.trainers is not None else None,
            key=joined_engine_key(fleet_token(self._run_dir.path)),
        )
        stack.callback(joined.supervisor.close)
        return joined

    def fleet(self) -> list[JsonObject]:
        """Return a row for every engine of the trained model: name, address, state, version, load, age."""
        assert self.engines is not None
        joined = [] if self.joined is None else self.joined.members()
        names = {url: f"engine-{number}" for number, url in enumerate(self.engines.urls)}
        names |= {member.request.url: member.name for member in joined}
        since = dict.fromkeys(self.engines.urls, self._began) | {one.request.url: one.since for one in joined}
        return self.runtime.run(fleet_rows(self.runtime.pool, names, since, self._away()), whom="the fleet")

    def _away(self) -> dict[str, str]:
        """Return the reasons, by URL, of engines that get no requests now."""
        return {url: why for supervisor in self.supervisors for url, why in supervisor.away().items()}

    def watch_engines(self, stack: ExitStack) -> EngineStates | None:
        """Start to watch the states of the engines of the trained model."""
        if self.engines is None:
            return None
        engines, joined, pool = self.engines, self.joined, self.runtime.pool

        def urls() -> list[str]:
            return [*engines.urls, *([] if joined is None else joined.urls)]

        def why_ended(index: int) -> str | None:
            return engines.why_ended(index) if index < len(engines.urls) else None

        def load_of(url: str) -> EngineLoad | None:
            return request_load(url, api_key=pool.key_of(url))

        states = EngineStates(urls, why_ended=why_ended, away=self._away, load_of=load_of)
        stack.callback(states.close)
        states.start()
        return states

    def _make_supervisors(self, stack: ExitStack) -> list[Supervisor]:
        config = self.config
        if not config.use_fault_tolerance or self.engines is None:
            return []
        made: list[tuple[EngineFleet, EnginePool, Refresh, Route]] = []
        if self.engines.own_fleet is not None:
            own = self._refresh if self.publisher is not None else None
            made.append((self.engines.own_fleet, self.runtime.pool, own, self.engines.route))
        for name, frozen in self.engines.frozen_fleets.items():
            made.append((frozen, self.runtime.frozen_pools[name], None, partial(self.engines.route, model=name)))
        if self.teacher_engine is not None and self.runtime.state.teacher is not None:
            made.append((self.teacher_engine, self.runtime.state.teacher.pool, None, None))
        supervisors = [] if self.joined is None else [self.joined.supervisor]
        for fleet, pool, refresh, route in made:
            one = Supervisor(
                fleet,
                pool,
                self.runtime.run,
                self._watch(),
                refresh=refresh,
                route=route,
                key=fleet.key,
                may_be_empty=self.joined is not None and pool is self.runtime.pool,
            )
            stack.callback(one.close)
            supervisors.append(one)
        return supervisors

    def _watch(self) -> HealthCheckSettings:
        config = self.config
        return HealthCheckSettings(
            config.rollout_health_check_interval,
            config.rollout_health_check_timeout,
            config.rollout_health_check_first_wait,
            config.engine_max_restarts,
        )

    # operation

    @contextmanager
    def engines_at_work(self) -> Iterator[None]:
        """Supervise the engines while the body runs; a dead engine is reported instead of the call that failed."""
        with ExitStack() as stack:
            for supervisor in self.supervisors:
                stack.enter_context(supervisor.watching())
            try:
                yield
            except RunFailed:
                self._check_engines()
                raise

    def _check_engines(self) -> None:
        """Raise if an engine is dead or was given up, which explains why a call failed."""
        for supervisor in self.supervisors:
            supervisor.check()
        for fleet in (self.engines, self.teacher_engine):
            if fleet is not None:
                fleet.check()

    @contextmanager
    def trainers_at_work(self) -> Iterator[None]:
        """Hold the trainers while their weights may change: a restarted engine waits for the next update."""
        with self._trainers_busy:
            yield

    def trained(self, version: int) -> None:
        """Record the version that the trainers hold: a restarted engine gets it before it is published."""
        self._version = version

    def publish(self, version: int) -> PublishResult:
        """Send the trainers' weights to every engine; engines that fail during it are restarted and updated too.

        A dead engine is reported instead of the call that failed.
        """
        assert self.publisher is not None
        failure: EngineError | WeightVersionMismatch | None = None
        try:
            with ExitStack() as stack:
                for supervisor in self.supervisors:
                    stack.enter_context(supervisor.undisturbed())
                stack.enter_context(self.trainers_at_work())
                while True:
                    before = sum(supervisor.changes for supervisor in self.supervisors)
                    for supervisor in self.supervisors:  # restart or drop engines that are not well
                        supervisor.heal()
                    if any(supervisor.waiting for supervisor in self.supervisors):
                        self.publisher.engines_changed()
                    if failure is not None and sum(supervisor.changes for supervisor in self.supervisors) == before:
                        raise failure  # all engines are well, so a retry would fail again
                    try:
                        published = self.publisher.publish(version)
                        break
                    except (EngineError, WeightVersionMismatch) as error:
                        if self.joined is not None:  # only the joined engine that fails is dropped
                            self.joined.report_failure(error.url, str(error))
                        elif not self.supervisors or isinstance(error, WeightVersionMismatch):
                            raise
                        logger.warning("publishing version %d again: %s", version, error)
                        failure = error
                self._version = version
                self.runtime.state.weights_arrived(str(version))
                for supervisor in self.supervisors:
                    supervisor.weights_arrived()
        except RunFailed:
            self._check_engines()
            raise
        return published

    def _refresh(self, url: str) -> bool:
        """Send the current weights to one engine, if the trainers still hold them and are free."""
        if self._version is None or not self._trainers_busy.acquire(blocking=False):
            return False
        try:
            assert self.publisher is not None
            client = next(client for client in self.runtime.pool.clients if client.base_url == url)
            base = None if self.joined is None else self.joined.version_of(url)
            if base == self._version and self.runtime.run(client.get_weight_version()) == str(base):
                return True  # it was only unreachable for a moment
            return self.publisher.bring([client], self._version, base=base)
        except WeightVersionMismatch as error:
            raise EngineProtocolError(url, "/get_weight_version", str(error)) from error
        finally:
            self._trainers_busy.release()


def with_fault_tolerance_across_nodes(config: Config, placement: SlotPlacement) -> Config:
    """Turn on fault tolerance for engines on several nodes: an engine whose node is lost moves to another one or is
    dropped. Prefill and decode servers are excepted, as they are not restarted one by one."""
    if all(slot.node.is_here for slot in placement.rollout) or config.prefill_num_servers or config.sglang_config:
        return config
    return config.replace(use_fault_tolerance=True)


def places(config: Config) -> dict[str, int]:
    """Count the trainers and the engine GPUs that a run starts."""
    engines = config.rollout_num_gpus if needs_engines(config) else 0
    if engines and config.rollout_external_engine_addrs:
        engines = 1 if serves_teacher(config) else 0
    return {"trainers": 0 if config.debug_rollout_only else num_trainers(config), "rollout": engines}
