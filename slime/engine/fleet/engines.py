"""All that generates in a run: the engines of every model, their routers, or engines that somebody else runs.

Invariant: after `start` every engine and router answers, `urls` are the engines whose weights are updated, and each
model has an address to be reached at. A frozen model is served by a fleet of its own, which no update ever reaches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from slime.cluster.node import Slot
from slime.cluster.ports import is_loopback
from slime.config import Config
from slime.engine.fleet.backend import (
    EMBEDDED,
    EXTERNAL,
    SGLANG_ROUTER,
    SGLANG_SERVER,
    choose_backend,
    choose_router,
    installed_sglang,
)
from slime.engine.fleet.external import Capabilities, EngineKind, ExternalEngines, probe, without_missing
from slime.engine.fleet.processes import EngineFleet, refuse_for_embedded
from slime.engine.http.blocking import engine_key, made_key
from slime.engine.sglang.launch import check_server_flags
from slime.engine.sglang.router import SglangRouter, external_router, installed_router
from slime.engine.sglang.topology import DEFAULT_MODEL, ServedModel, read_topology, simple_model
from slime.errors import RunFailed, UserError
from slime.models.folder import quantization, read_config_json

_END_IS_SEEN_S = 2.0
"""How long it may take from a connection that breaks to a process that is seen to have ended."""

logger = logging.getLogger(__name__)


class Engines:
    """The engines of the model that is trained, and what serves the others; on `slots`, or on this machine."""

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        run_dir: str | os.PathLike[str],
        slots: Sequence[Slot] | None = None,
        spare: Callable[[Slot], Slot | None] | None = None,
    ) -> None:
        self._config = config
        self.backend, _ = choose_backend(config, device)
        self.models = served_models(config, self.backend)
        self.key = engine_key(config) or made_key()
        """What all of them ask for, unless they are somebody else's and ask for none."""
        self._slots = slots
        self._fleets: dict[str, EngineFleet | ExternalEngines] = {}
        for number, model in enumerate(self.models):
            name = "engine" if number == 0 else model.name
            self._fleets[model.name] = (
                ExternalEngines(config)
                if self.backend == EXTERNAL
                else EngineFleet(
                    config,
                    device=device,
                    run_dir=run_dir,
                    model_path=model.model_path,
                    name=name,
                    model=model,
                    slots=slots,
                    key=self.key,
                    spare=spare,
                )
            )
        self.capabilities: list[Capabilities] = []
        self._is_stopped = False
        self._routers: dict[str, SglangRouter] = {}
        self._make_routers(run_dir)

    @property
    def kind(self) -> EngineKind:
        """Embedded or sglang: what the engines of the trained model are, once they have started."""
        return self.capabilities[0].kind

    @property
    def size(self) -> int:
        """Engines of all models."""
        return sum(fleet.size for fleet in self._fleets.values())

    @property
    def urls(self) -> list[str]:
        """The engines of the model that is trained."""
        return self._trained.urls

    @property
    def router_url(self) -> str | None:
        """The sglang-router in front of them, if there is one."""
        router = self._routers.get(self.models[0].name)
        return None if router is None else router.url

    @property
    def model_urls(self) -> dict[str, list[str]]:
        """Where to send requests for each model: to its router, or to one of its engines."""
        return {
            name: [self._routers[name].url] if name in self._routers else fleet.urls
            for name, fleet in self._fleets.items()
        }

    def addresses(self) -> dict[str, Any]:
        """What a rollout runtime must know beside `urls`."""
        return {
            "router_url": self.router_url,
            "router_only": self.models[0].is_disaggregated,
            "api_key": self.key,
            "is_open": self._is_open(),
            "model_urls": self.model_urls,
        }

    def _is_open(self) -> bool:
        """Whether what generates asks for no key. SGLang's router and servers of ours always do."""
        router = self._routers.get(self.models[0].name)
        if router is not None:
            return not router.is_ours
        if self.backend == EXTERNAL:
            return engine_key(self._config) is None
        addresses = [self._config.host] if self._slots is None else [slot.node.address for slot in self._slots]
        return self.backend == EMBEDDED and all(is_loopback(address) for address in addresses)

    def without_missing(self, config: Config) -> Config:
        """The config without what the engines turned out to lack; each thing is said in one sentence."""
        config, sentences = without_missing(config, self.capabilities)
        for sentence in sentences:
            logger.warning("%s", sentence)
        return config

    def start(self) -> list[str]:
        """Start everything that is ours; returns `urls`."""
        try:
            self._start_fleets()
            self.capabilities = self._probed()
            for name, router in self._routers.items():
                self._go_on()
                router.start(self._fleets[name].launches)
        except BaseException:
            self.stop()
            raise
        for name, urls in self.model_urls.items():
            logger.info("model %s is served at %s", name, " ".join(urls))
        return self.urls

    @property
    def own_fleet(self) -> EngineFleet | None:
        """The engines of the trained model, if they are ours to restart."""
        return self._trained if isinstance(self._trained, EngineFleet) else None

    @property
    def frozen_fleets(self) -> dict[str, EngineFleet]:
        """The engines of every other model, by its name."""
        return {name: fleet for name, fleet in list(self._fleets.items())[1:] if isinstance(fleet, EngineFleet)}

    def route(self, url: str, up: bool, *, model: str | None = None) -> None:
        """Tell the router of a model, by default of the trained one, whether one of its engines is there."""
        router = self._routers.get(self.models[0].name if model is None else model)
        if router is not None:
            (router.add_worker if up else router.remove_worker)(url)

    @property
    def _trained(self) -> EngineFleet | ExternalEngines:
        return self._fleets[self.models[0].name]

    @property
    def _parts(self) -> list[EngineFleet | ExternalEngines | SglangRouter]:
        return [*self._fleets.values(), *self._routers.values()]

    def check(self) -> None:
        """Raise if an engine or a router has ended."""
        for part in self._parts:
            part.check()

    def why_ended(self, index: int) -> str | None:
        """How one engine of the trained model ended; None while it runs."""
        return self._trained.why_ended(index)

    def restart(self, index: int) -> None:
        """Start one engine of the trained model again; its router forgets it meanwhile."""
        engine, router = self._trained.launches[index], self._routers.get(self.models[0].name)
        if router is not None:
            router.remove_worker(engine.url)
        self._trained.restart(index)
        if router is not None:
            router.add_worker(engine.url, engine.worker_type, engine.bootstrap_port)

    def pids(self) -> list[int]:
        """All processes of the engines and routers."""
        return [pid for part in self._parts for pid in part.pids()]

    def stop(self) -> None:
        """Stop what was started, the routers first, and start no more. Safe to call again."""
        self._is_stopped = True
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.stop)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_fleets(self) -> None:
        """All at once; if one fails, the others are not waited for."""
        with ThreadPoolExecutor(len(self._fleets)) as pool:
            starting = [pool.submit(fleet.start) for fleet in self._fleets.values()]
            wait(starting, return_when=FIRST_EXCEPTION)
            failed = next((one for one in starting if one.done() and one.exception() is not None), None)
            if failed is not None:
                self.stop()
                failed.result()

    def _probed(self) -> list[Capabilities]:
        """What each engine of the trained model can do; one that has ended meanwhile is named, with its log."""
        try:
            return [
                probe(engine.url, generate=engine.worker_type == "regular", api_key=self.key)
                for engine in self._trained.launches
            ]
        except RunFailed:
            self._trained.check(within_s=_END_IS_SEEN_S)
            raise

    def _go_on(self) -> None:
        if self._is_stopped:
            raise RunFailed("the engines were stopped while they were starting")

    def _make_routers(self, run_dir: str | os.PathLike[str]) -> None:
        config = self._config
        choice, reason = choose_router(config, self.backend)
        logger.info("router %s: %s", choice, reason)
        for number, model in enumerate(self.models):
            if choice == SGLANG_ROUTER:
                self._routers[model.name] = SglangRouter(
                    config,
                    run_dir=run_dir,
                    name="router" if number == 0 else f"router-{model.name}",
                    disaggregated=model.is_disaggregated,
                    is_first=number == 0,
                    key=self.key,
                )
            elif model.is_disaggregated:
                raise UserError(f"prefill and decode servers need sglang-router ({reason}): see --sglang-router-python")
        if config.use_fault_tolerance and self.models[0].is_disaggregated:
            raise UserError(
                "--use-fault-tolerance restarts whole engines: it does not go with prefill and decode servers"
            )


def served_models(config: Config, backend: str) -> tuple[ServedModel, ...]:
    """The models of a run; only SGLang serves more than the one that is trained."""
    if backend != SGLANG_SERVER:
        plain = config.replace(prefill_num_servers=None)
        return (simple_model(plain, config.hf_checkpoint, DEFAULT_MODEL),)
    return read_topology(config)


def alone_engine(config: Config) -> Config:
    """The config of a fleet of one engine beside the others, on the rollout's first GPU."""
    return config.replace(
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        engine_port=None,
        sglang_config=None,
        prefill_num_servers=None,
        rollout_external_engine_addrs=None,
    )


def count_engines(config: Config, backend: str) -> int:
    """How many engines a run uses."""
    if backend == EXTERNAL:
        return ExternalEngines(config).size
    return sum(model.num_engines for model in served_models(config, backend))


def check_engines(config: Config, backend: str, device: str) -> None:
    """Refuse, before anything starts, flags that the chosen engines and router do not have."""
    if backend == EMBEDDED:
        refuse_for_embedded(config, device)
    elif backend == EXTERNAL:
        ExternalEngines(config)
    else:
        check_server_flags(config, read_topology(config), installed_sglang(config))
    if choose_router(config, backend)[0] == SGLANG_ROUTER and external_router(config) is None:
        installed_router(config)


def refuse_quantised(config: Config, backend: str) -> None:
    """SGLang keeps a quantised folder as it is, and would take the trained weights, plain numbers, for such."""
    folder = config.hf_checkpoint
    if backend != SGLANG_SERVER or folder is None or config.debug_rollout_only:
        return
    method = quantization(read_config_json(folder)).get("quant_method")
    if method is not None:
        raise UserError(
            f"--hf-checkpoint {folder} is quantised ({method}), and SGLang's engines cannot be sent trained weights "
            f"for it: write it in plain numbers first (slime convert {folder} DIR) and give that folder"
        )
