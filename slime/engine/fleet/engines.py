"""Engines and routers of all models of a run, or external engines.

Invariant: after `start` every engine and router answers, `urls` are the engines whose weights are updated, and each
model has an address. A frozen model is served by a separate fleet, which gets no weight updates.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Self

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
from slime.engine.fleet.external import Capabilities, EngineKind, ExternalEngines, drop_unsupported, probe
from slime.engine.fleet.processes import EngineFleet, check_embedded_flags
from slime.engine.http.blocking import engine_key, made_key
from slime.engine.sglang.launch import check_server_flags
from slime.engine.sglang.router import SglangRouter, external_router, installed_router
from slime.engine.sglang.topology import DEFAULT_MODEL, ServedModel, read_topology, simple_model
from slime.errors import RunFailed, UserError
from slime.models.folder import quantization, read_config_json
from slime.storage.json_types import JsonObject

_EXIT_DETECTION_S = 2.0
"""Maximum delay between a broken connection and the detected end of its process."""

logger = logging.getLogger(__name__)


class Engines:
    """Engines of the trained model and of the other models, with their routers; on `slots`, or on this machine."""

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
        """API key of all engines, except of external engines without a key."""
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
                "--use-fault-tolerance restarts whole engines: it does not support prefill and decode servers"
            )

    @property
    def kind(self) -> EngineKind:
        """Kind of the trained model's engines (embedded or sglang); known after `start`."""
        return self.capabilities[0].kind

    @property
    def size(self) -> int:
        """Number of engines of all models."""
        return sum(fleet.size for fleet in self._fleets.values())

    @property
    def urls(self) -> list[str]:
        """Base URLs of the trained model's engines."""
        return self._trained.urls

    @property
    def router_url(self) -> str | None:
        """URL of the sglang-router in front of the trained model's engines; None without a router."""
        router = self._routers.get(self.models[0].name)
        return None if router is None else router.url

    @property
    def model_urls(self) -> dict[str, list[str]]:
        """URLs for the requests of each model: its router, or its engines."""
        return {
            name: [self._routers[name].url] if name in self._routers else fleet.urls
            for name, fleet in self._fleets.items()
        }

    def addresses(self) -> JsonObject:
        """Connection settings of a rollout runtime, in addition to `urls`.

        `is_open` is true if generation needs no key; the run's own SGLang routers and servers always require one.
        """
        router = self._routers.get(self.models[0].name)
        if router is not None:
            is_open = not router.is_ours
        elif self.backend == EXTERNAL:
            is_open = engine_key(self._config) is None
        else:
            hosts = [self._config.host] if self._slots is None else [slot.node.address for slot in self._slots]
            is_open = self.backend == EMBEDDED and all(is_loopback(host) for host in hosts)
        return {
            "router_url": self.router_url,
            "router_only": self.models[0].is_disaggregated,
            "api_key": self.key,
            "is_open": is_open,
            "model_urls": self.model_urls,
        }

    def supported_config(self, config: Config) -> Config:
        """The config without the features that the engines lack; each change is logged as one sentence."""
        config, sentences = drop_unsupported(config, self.capabilities)
        for sentence in sentences:
            logger.warning("%s", sentence)
        return config

    def start(self) -> list[str]:
        """Start or attach all engines, probe those of the trained model, and start the routers; returns `urls`."""
        try:
            with ThreadPoolExecutor(len(self._fleets)) as executor:  # if one fails, the others need not finish starting
                starting = [executor.submit(fleet.start) for fleet in self._fleets.values()]
                wait(starting, return_when=FIRST_EXCEPTION)
                failed = next((one for one in starting if one.done() and one.exception() is not None), None)
                if failed is not None:
                    self.stop()
                    failed.result()
            try:
                self.capabilities = [
                    probe(engine.url, generate=engine.worker_type == "regular", api_key=self.key)
                    for engine in self._trained.launches
                ]
            except RunFailed:
                self._trained.check(within_s=_EXIT_DETECTION_S)  # if an engine has died, its error names it and its log
                raise
            for name, router in self._routers.items():
                if self._is_stopped:
                    raise RunFailed("the engines were stopped while they were starting")
                router.start(self._fleets[name].launches)
        except BaseException:
            self.stop()
            raise
        for name, urls in self.model_urls.items():
            logger.info("model %s is served at %s", name, " ".join(urls))
        return self.urls

    @property
    def own_fleet(self) -> EngineFleet | None:
        """Fleet of the trained model; None for external engines, which are not restarted."""
        return self._trained if isinstance(self._trained, EngineFleet) else None

    @property
    def frozen_fleets(self) -> dict[str, EngineFleet]:
        """Fleets of the other models, by model name."""
        return {name: fleet for name, fleet in list(self._fleets.items())[1:] if isinstance(fleet, EngineFleet)}

    def route(self, url: str, up: bool, *, model: str | None = None) -> None:
        """Add an engine to the router of a model (default: the trained model), or remove it."""
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
        """Describe how an engine of the trained model ended; None while it runs."""
        return self._trained.why_ended(index)

    def stop(self) -> None:
        """Stop all routers, then all engines; nothing is started afterwards. Idempotent."""
        self._is_stopped = True
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.stop)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def served_models(config: Config, backend: str) -> tuple[ServedModel, ...]:
    """The models of a run; only SGLang serves models in addition to the trained one."""
    if backend != SGLANG_SERVER:
        without_prefill = config.replace(prefill_num_servers=None)
        return (simple_model(without_prefill, config.hf_checkpoint, DEFAULT_MODEL),)
    return read_topology(config)


def single_engine_config(config: Config) -> Config:
    """Config of a separate fleet with one engine, on the rollout's first GPU."""
    return config.replace(
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        engine_port=None,
        sglang_config=None,
        prefill_num_servers=None,
        rollout_external_engine_addrs=None,
    )


def count_engines(config: Config, backend: str) -> int:
    """Number of engines that a run uses."""
    if backend == EXTERNAL:
        return ExternalEngines(config).size
    return sum(model.num_engines for model in served_models(config, backend))


def check_engines(config: Config, backend: str, device: str) -> None:
    """Refuse flags that the chosen engines and router do not support, before anything starts."""
    if backend == EMBEDDED:
        check_embedded_flags(config, device)
    elif backend == EXTERNAL:
        ExternalEngines(config)
    else:
        check_server_flags(config, read_topology(config), installed_sglang(config))
    if choose_router(config, backend)[0] == SGLANG_ROUTER and external_router(config) is None:
        installed_router(config)


def refuse_quantised(config: Config, backend: str) -> None:
    """Refuse a quantised model folder for SGLang, which would interpret the unquantised trained weights as quantised
    ones."""
    folder = config.hf_checkpoint
    if backend != SGLANG_SERVER or folder is None or config.debug_rollout_only:
        return
    method = quantization(read_config_json(folder)).get("quant_method")
    if method is not None:
        raise UserError(
            f"--hf-checkpoint {folder} is quantised ({method}), and SGLang's engines cannot be sent trained weights "
            f"for it: write it in plain numbers first (slime convert {folder} DIR) and give that folder"
        )
