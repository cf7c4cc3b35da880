"""Owns the resources of the rollout of a run, and finds them by the `args` of rollout functions and plugins.

Rollout functions and plugins receive only `args`. All copies of `args` share a mark, and `runtime_for(args)` looks up
the runtime by this mark. `RolloutRuntime` registers itself on creation and unregisters in `close`. The registry is the
only process-wide state of the room, and it is empty once all runtimes are closed. A copy of `args` with changed flags
finds the same runtime, but calls with it use the changed values.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from slime.cluster.watchdog import wait_for
from slime.config import Config
from slime.config.datasets import EvalDataset, train_datasets
from slime.config.plugins import is_async, load_function, load_plugin
from slime.config.plugins.args import run_mark
from slime.config.plugins.view import (
    config_with_changed_args,
    plugin_args,
    set_plugin_args,
    with_own_overlay,
)
from slime.data.buffer import Journal
from slime.data.chat_template import encode, load_tokenizer, model_vocab_size, prompt_text
from slime.data.prompts import PromptDataset
from slime.data.routed_experts import RouterDimensions
from slime.data.sample import ArrayMover, Sample
from slime.data.trace import TraceSpan, trace_span
from slime.data.validation import Bounds
from slime.engine.http.blocking import engine_key
from slime.engine.http.pool import EnginePool
from slime.engine.http.router import Router
from slime.engine.sglang.router import RoutedPool
from slime.errors import UserError
from slime.rollout.event_loop import MOST_THREADS, STALL_S, DaemonThreads, LoopThread
from slime.rollout.gate import ConcurrencyLimit, current_ticket, evaluating, paused_sample_clock
from slime.rollout.legacy_signatures import as_generate
from slime.rollout.outcomes import FailureLog, Group, SampleOwners, call_contained
from slime.rollout.progress import SampleProgress
from slime.rollout.rewards.hub import RewardHub, RewardSettings
from slime.rollout.state import GenerateState
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
CLOSE_ALL_TIMEOUT_S = 300.0
_PROMPTS_KNOWN = 4
GENERATE_FLAG = "--custom-generate-function-path"

_runtimes: dict[str, RolloutRuntime] = {}
"""The open runtimes by the mark of their `args`, in the order of their creation."""


@dataclass(frozen=True)
class EvalPrompts:
    """An evaluation dataset and its prompts."""

    dataset: EvalDataset
    prompts: PromptDataset


class RolloutRuntime:
    """Engine pool, tokenizer, reward hub, plugins, concurrency limit and their event loop.

    `args` is the config that rollout uses: the given one plus `sglang_router_ip` and `sglang_router_port`, which point
    at `router_url` if the engines have a router, else at the only engine, or at a router of this process if there are
    several engines. Without engines (supervised training) these two are absent, and using `pool` raises an error.
    With `router_only`, engines take requests only through the router; with `is_open`, they accept requests from this
    machine without their key (`api_key`). `model_urls` are the addresses of every served model; `sglang_model_routers`
    has one entry per model. `dispatch` generates and scores a dispatched group
    (`slime.rollout.sample_pipeline.generate_and_rm_group`). Functions of the user are called with `plugin_args`.
    `is_of_run` is False for the runtime of a caller outside a run; `runtime_for` does not return it as the running one.
    """

    def __init__(
        self,
        config: Config,
        engine_urls: Sequence[str],
        *,
        dispatch: Callable[..., Coroutine[object, object, Group]],
        reward: Callable[..., object] | None = None,
        router_url: str | None = None,
        router_only: bool = False,
        model_urls: Mapping[str, Sequence[str]] | None = None,
        api_key: str | None = None,
        is_open: bool = False,
        is_of_run: bool = True,
    ) -> None:
        if config.overlay.mark in _runtimes:
            config = with_own_overlay(config)
        self.config = config
        self._reward = reward
        self.is_of_run = is_of_run
        self.loop_thread = LoopThread()
        self.run = self.loop_thread.run
        self.threads = DaemonThreads("plugin", MOST_THREADS)
        """Threads for plain functions of the user; the concurrency limit bounds the generate functions among them."""
        self._one_at_a_time = asyncio.Lock()
        self.failures = FailureLog()
        self.claims = SampleOwners()
        self.pulse, self.eval_pulse = SampleProgress(), SampleProgress()
        self.journal: Journal | None = None
        self.keep: ArrayMover | None = None
        """Puts arrays into memory that trainers read; None if no trainer reads them."""
        self.when_recorded: list[Callable[[Sample], Awaitable[None]]] = []
        """Callbacks run with a dispatched sample once its result is in the journal, to delete intermediate records."""
        self._router_url, self._router_only = router_url, router_only
        self._key = engine_key(config) if api_key is None else api_key
        self._is_open = is_open or self._key is None
        timeout_s = config.engine_request_timeout
        self._pool: EnginePool | None = None
        if engine_urls and router_url is not None:
            self._pool = RoutedPool(
                engine_urls, router_url, router_only=router_only, timeout_s=timeout_s, api_key=self._key
            )
        elif engine_urls:
            self._pool = EnginePool(engine_urls, timeout_s=timeout_s, api_key=self._key)
        self.frozen_pools: dict[str, EnginePool] = {}
        """Engines of the frozen models, by name."""
        self._routers: list[Router] = []
        self._functions: dict[tuple[str, str], Callable[..., object]] = {}
        self._hubs: dict[RewardSettings, RewardHub] = {}
        self._owned: dict[str, tuple[Any, Callable[[Any], Awaitable[None]] | None]] = {}
        self._model = _ModelFolder(config)
        try:
            addresses = {} if self._pool is None else self._router_addresses(self._pool, model_urls or {})
        except BaseException:
            self.loop_thread.close()
            raise
        self.args = config.replace(carried={**config.carried, **addresses})
        set_plugin_args(self.args, carried=self.args.carried, **addresses)
        self.plugin_args: Any = plugin_args(self.args)
        self.semaphore = ConcurrencyLimit(self._seats())
        if self._pool is not None:
            self._pool.when_changed.append(lambda state, url: self.semaphore.resize(self._seats()))
        self.state = GenerateState(
            self.args,
            dispatch=lambda group, params, generated: dispatch(self, group, params, generated=generated),
            semaphore=self.semaphore,
            tokenizer=lambda: self.tokenizer,
            engine_urls=lambda: self.engine_urls,
        )
        self.task_params = {one.name: one.sampling_params for one in train_datasets(config)}
        """Sampling parameters that the datasets of `--prompt-config` set for their prompts."""
        self.eval_datasets: dict[str, EvalPrompts] = {}
        self.single_eval_datasets: dict[str, EvalPrompts] = {}
        """Datasets that a rollout file of the user evaluates one at a time."""
        _runtimes[config.overlay.mark] = self

    @property
    def traces(self) -> bool:
        """True if samples record traces, which is so if rollouts are dumped, because dumps show them."""
        return self.args.save_debug_rollout_data is not None

    def span(self, target: object, name: str) -> AbstractContextManager[TraceSpan | None]:
        """Record a span in the traces of samples; does nothing if samples are not traced."""
        return trace_span(target, name) if self.traces else nullcontext()

    @property
    def pool(self) -> EnginePool:
        """The engines of the run; raises an error in a run without engines."""
        if self._pool is None:
            raise RuntimeError("this run has no engines, but its rollout function wants to generate")
        return self._pool

    @property
    def engine_urls(self) -> list[str]:
        """URLs of the current engines; empty in a run without engines."""
        return [] if self._pool is None else self._pool.urls

    def _seats(self) -> int:
        return self.config.sglang_server_concurrency * max(1, len(self.engine_urls))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of ``--hf-checkpoint``, loaded on first use."""
        return self._model.tokenizer

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Return the token ids of a sample's prompt; recent prompts are cached, so a group is encoded once."""
        return list(self._model.encode(prompt_text(self.tokenizer, sample)))

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of special tokens, such as the end of a sequence or a turn, and padding."""
        return self._model.special_token_ids

    @property
    def bounds(self) -> Bounds:
        """Limits that samples must satisfy for this model; those of an evaluation only the vocabulary size."""
        bounds = self._model.bounds
        return Bounds(bounds.vocab_size) if evaluating.get() else bounds

    @property
    def hub(self) -> RewardHub:
        """The reward functions, created on first use."""
        settings = RewardSettings.of(self.args)
        if settings not in self._hubs:
            self._hubs[settings] = RewardHub(self.args, self._reward, args=self.plugin_args)
        return self._hubs[settings]

    @property
    def has_user_reward(self) -> bool:
        """True if a function of the user scores the samples of training."""
        return self._reward is not None or self.args.custom_rm_path is not None

    def with_args(self, args: object) -> RolloutRuntime:
        """Return this runtime for a call with `args`: itself, or a copy that uses the changed flags in `args`."""
        if args is self.plugin_args or args is self.args or args is self.config:
            return self
        twin = copy.copy(self)
        twin.plugin_args = self.plugin_args if isinstance(args, Config) else args
        twin.args = args if isinstance(args, Config) else config_with_changed_args(self.args, args)
        return twin

    def function(self, path: str, *, flag: str, params: Sequence[str]) -> Callable[..., object]:
        """Return the plugin function of a path, loaded once; a generate function is adapted to take one sample."""
        key = (flag, path)
        if key not in self._functions:
            if flag == GENERATE_FLAG:
                self._functions[key] = as_generate(load_plugin(path, flag), lambda: self.tokenizer)
            else:
                self._functions[key] = load_function(path, what=flag, params=params)
        return self._functions[key]

    def key_of(self, url: str) -> str | None:
        """Return the API key of the engine of this run at a URL; None for every other URL."""
        address = urlsplit(url)
        pools = [*([] if self._pool is None else [self._pool]), *self.frozen_pools.values()]
        return next((key for pool in pools if (key := pool.key_of(f"http://{address.netloc}")) is not None), None)

    async def call_function(self, function: Callable[..., object], who: str, *args: object, **kwargs: object) -> object:
        """Call a function of the user for a sample: an async one is awaited here, a plain one runs in a thread.

        Its own SystemExit or CancelledError becomes an ordinary error (`contained`). The clock of the sample stops
        while a plain function waits for a thread.
        """
        call = partial(function, *args, **kwargs)
        if is_async(function):
            return await call_contained(call, who)

        async def call_in_thread() -> object:
            with paused_sample_clock():
                future = await self.threads.begin(call, who)
            result = await future
            return await result if inspect.isawaitable(result) else result

        return await call_contained(call_in_thread, who)

    async def off_loop(self, function: Callable[..., T], who: str, *args: object, **kwargs: object) -> T:
        """Call a plain function over several samples in a thread, within `STALL_S`, and return its result.

        Only one such call runs at a time, so filters and data sources of the user need no locks.
        """
        async with self._one_at_a_time:
            future = await self.threads.begin(partial(function, *args, **kwargs), who)
            result: T = await wait_for(future, who, "to return", timeout_s=STALL_S)
            return result

    @property
    def router_address(self) -> tuple[str | None, bool, str | None]:
        """URL of the engines' router, if any; whether only the router takes requests; and the key of the engines."""
        return self._router_url, self._router_only, self._key

    def owned(self, name: str, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> T:
        """Return the object registered under `name`; it is created on the first call and closed with the runtime."""
        if name not in self._owned:
            self._owned[name] = make(), close
        kept: T = self._owned[name][0]
        return kept

    async def on_own_loop(self, coro: Coroutine[object, object, T]) -> T:
        """Await a coroutine on the runtime's event loop, from any event loop."""
        if asyncio.get_running_loop() is self.loop_thread.loop:
            return await coro
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self.loop_thread.loop))

    def close(self) -> None:
        """Close connections, reward workers, router and loop; a second call does nothing."""
        if self.loop_thread.loop.is_closed():
            return
        with ExitStack() as last:  # tasks in the loop can find their runtime until the loop ends
            last.callback(_runtimes.pop, self.config.overlay.mark, None)
            last.callback(self.loop_thread.close)
            self.run(self._aclose(), CLOSE_ALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _aclose(self) -> None:
        if self.state.continuous is not None:
            await _close_with_timeout("generation", self.state.continuous.aclose())
        await _close_with_timeout("samples in the making", self.state.cancel_held())
        while self._owned:
            name, (kept, close) = self._owned.popitem()  # last made, first closed
            if close is not None:
                await _close_with_timeout(name, close(kept))
        for router in self._routers:
            await _close_with_timeout("router", router.aclose())
        for name, pool in self.frozen_pools.items():
            await _close_with_timeout(f"connections to {name}", pool.aclose())
        for hub in self._hubs.values():
            await _close_with_timeout("reward workers", hub.aclose())
        if self._pool is not None:
            await _close_with_timeout("connections to the engines", self._pool.aclose())
        self.threads.close()

    def _router_addresses(self, trained: EnginePool, model_urls: Mapping[str, Sequence[str]]) -> JsonObject:
        host, port = self._address([self._router_url] if self._router_url else trained.urls, trained)
        models: dict[str, tuple[str, int]] = {}
        for name, urls in model_urls.items():
            if not models:
                models[name] = (host, port)  # the model that is trained
            else:
                pool = EnginePool(urls, timeout_s=self.config.engine_request_timeout, api_key=self._key)
                self.frozen_pools[name] = pool
                models[name] = self._address(urls, pool)
        return {"sglang_router_ip": host, "sglang_router_port": port, "sglang_model_routers": models}

    def _address(self, urls: Sequence[str], pool: EnginePool) -> tuple[str, int]:
        """Return the address of the only engine, or of a new router over the pool, which handles joining engines."""
        may_grow = self.config.fleet_address is not None and pool is self._pool and self._router_url is None
        if len(urls) > 1 or not self._is_open or may_grow:
            router = Router(pool)
            self._routers.append(router)
            return self.run(router.start(), CLOSE_TIMEOUT_S)
        address = urlsplit(urls[0])
        if address.hostname is None or address.port is None:
            raise ValueError(f"an engine URL needs a host and a port: {urls[0]}")
        return address.hostname, address.port


async def _close_with_timeout(what: str, closing: Awaitable[None]) -> None:
    """Wait until a resource is closed; on timeout log a warning and continue, because the results are complete."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
    except TimeoutError:
        logger.warning("%s: not closed after %g s; it ends with the process", what, CLOSE_TIMEOUT_S)


class _ModelFolder:
    """Tokenizer and sample limits of the model folder, read on first use."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.encode = lru_cache(maxsize=_PROMPTS_KNOWN)(lambda text: tuple(encode(self.tokenizer, text)))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._config.hf_checkpoint is None:
            raise UserError("args.hf_checkpoint must name its folder: the tokenizer is read from the model")
        return load_tokenizer(self._config.hf_checkpoint, trust_remote_code=self._config.trust_remote_code)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def bounds(self) -> Bounds:
        return bounds_of(self._config)


def bounds_of(config: Config) -> Bounds:
    """Return the limits that the model of a run sets for its samples."""
    folder = config.hf_checkpoint
    if folder is None:
        return Bounds()
    return Bounds(model_vocab_size(folder), RouterDimensions.of(folder) if config.use_rollout_routing_replay else None)


def runtime_for(args: object) -> RolloutRuntime:
    """Return the runtime of these args, or of the args they were copied from; it uses the values in these args.

    A namespace without a mark, written by the user, means the running rollout.
    """
    runtime = find_runtime(args)
    if runtime is None:
        raise LookupError(
            "no rollout is running for these args: call this from a plugin of a run, or create "
            "RolloutRuntime(config, engine_urls, dispatch=...) and use its .plugin_args"
        )
    return runtime


def find_runtime(args: object) -> RolloutRuntime | None:
    """Return the runtime of these args like `runtime_for`; None if no rollout is running."""
    mark = args.overlay.mark if isinstance(args, Config) else run_mark(args)
    running = (one for one in _newest_first() if one.is_of_run)
    runtime = next(running, None) if mark is None else _runtimes.get(mark)
    return None if runtime is None else runtime.with_args(args)


def _newest_first() -> list[RolloutRuntime]:
    return list(reversed(_runtimes.values()))


def newest_runtime() -> RolloutRuntime | None:
    """Return the runtime created last, for compatibility helpers without args."""
    return next(iter(_newest_first()), None)


def state_of_engine(url: str) -> GenerateState | None:
    """Return the state of the rollout that uses the engine at this URL; None for every other URL."""
    ticket = current_ticket()
    serving = [runtime.state for runtime in _newest_first() if runtime.state.serves(url)]
    own = (state for state in serving if ticket is not None and state.gate is ticket.gate)
    return next(own, serving[0] if serving else None)


def key_behind(url: str) -> str | None:
    """Return the API key of the engine at this URL if it belongs to a run in this process."""
    found = (runtime.key_of(url) for runtime in _newest_first())
    return next((key for key in found if key is not None), None)


def accepts(function: Callable[..., object], name: str) -> bool:
    """Return whether a plugin function has a parameter of this name."""
    return name in inspect.signature(function).parameters
