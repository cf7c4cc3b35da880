"""Everything rollout needs while a run lasts, in one object with one owner.

Rollout functions and plugins receive only `args`, so they find their runtime through it: `args` has a mark, which all
copies of it share, and `runtime_for(args)` looks up whose it is. `RolloutRuntime` registers itself on creation and
leaves in `close`. This registry is the only process-wide state of the room and holds nothing once all runtimes are
closed. A copy of `args` in which flags were changed finds the same runtime, but calls with it go by its values.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, lru_cache, partial
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from slime.cluster.watchdog import wait_for
from slime.config import Config
from slime.config.datasets import train_datasets
from slime.config.plugins import is_async, load_function, load_plugin
from slime.config.plugins.args import run_mark
from slime.config.plugins.view import changed_by, plugin_args, tell_plugins, with_own_overlay
from slime.data.chat_template import encode, load_tokenizer, model_vocab_size, prompt_text
from slime.data.routed_experts import RoutedModel
from slime.data.sample import Keep, Sample
from slime.data.trace import Span, trace_span
from slime.data.validation import Bounds
from slime.engine.http.blocking import engine_key
from slime.engine.http.pool import EnginePool
from slime.engine.http.router import Router
from slime.engine.sglang.router import RoutedPool
from slime.errors import UserError
from slime.rollout.event_loop import MOST_THREADS, STALL_S, DaemonThreads, LoopThread
from slime.rollout.gate import Seats, clock_stopped, evaluating, ticket_here
from slime.rollout.legacy_signatures import as_generate
from slime.rollout.outcomes import Claims, FailureLog, contained
from slime.rollout.progress import Pulse
from slime.rollout.rewards.hub import RewardHub, RewardSettings
from slime.rollout.state import Dispatch, GenerateState

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
CLOSE_ALL_TIMEOUT_S = 300.0
_PROMPTS_KNOWN = 4
GENERATE_FLAG = "--custom-generate-function-path"


class RolloutRuntime:
    """Engine pool, tokenizer, reward hub, plugins, concurrency limit and the event loop they live in.

    `args` is the config that rollout goes by: the given one plus `sglang_router_ip` and `sglang_router_port`, which
    point at `router_url` if the engines have a router, else at the only engine, or at a router of our own when
    there are several. With no engine (supervised training) those two are absent and `pool` refuses to be used.
    `router_only` engines take no requests of their own; `is_open` ones generate for whoever is on this machine, without
    their key (`api_key`). `model_urls` are the addresses of every model that is served:
    `sglang_model_routers` has one for each. `dispatch` is what makes a finished group of a dispatched one
    (`slime.rollout.sample_pipeline.generate_and_rm_group`). `plugin_args` is what functions of the user are called with. One
    that is not `is_of_run` belongs to the namespace of a caller outside a run: it is not the rollout that is running.
    """

    def __init__(
        self,
        config: Config,
        engine_urls: Sequence[str],
        *,
        dispatch: Dispatch,
        reward: Callable[..., Any] | None = None,
        router_url: str | None = None,
        router_only: bool = False,
        model_urls: Mapping[str, Sequence[str]] | None = None,
        api_key: str | None = None,
        is_open: bool = False,
        is_of_run: bool = True,
    ) -> None:
        if _registry.find(config.overlay.mark) is not None:
            config = with_own_overlay(config)
        self.config = config
        self._reward = reward
        self.is_of_run = is_of_run
        self.loop_thread = LoopThread()
        self.threads = DaemonThreads("plugin", MOST_THREADS)
        """For plain functions of the user; the seats limit how many generate functions run."""
        self._one_at_a_time = asyncio.Lock()
        self.failures = FailureLog()
        self.claims = Claims()
        self.pulse, self.eval_pulse = Pulse(), Pulse()
        self.journal: Any = None
        self.keep: Keep | None = None
        """Puts arrays where trainers read them; None where nobody does."""
        self.when_recorded: list[Callable[[Sample], Awaitable[None]]] = []
        """Told of each dispatched sample once what it became is in the journal: what was kept of its way can go."""
        self._router_url, self._router_only = router_url, router_only
        self._key = engine_key(config) if api_key is None else api_key
        self._is_open = is_open or self._key is None
        self._model_urls = dict(model_urls or {})
        self._pool = self._make_pool(engine_urls)
        if self._pool is not None:
            self._pool.when_changed.append(self._engines_changed)
        self.frozen_pools: dict[str, EnginePool] = {}
        """The engines of models that are not trained, by name."""
        self._routers: list[Router] = []
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}
        self._hubs: dict[RewardSettings, RewardHub] = {}
        self._owned: dict[str, tuple[Any, Callable[[Any], Awaitable[None]] | None]] = {}
        self._model = _Model(config)
        try:
            addresses = self._router_addresses()
        except BaseException:
            self.loop_thread.close()
            raise
        self.args = config.replace(carried={**config.carried, **addresses})
        tell_plugins(self.args, carried=self.args.carried, **addresses)
        self.plugin_args: Any = plugin_args(self.args)
        self.semaphore = Seats(self._seats())
        self.state = GenerateState(
            self.args,
            dispatch=dispatch,
            semaphore=self.semaphore,
            tokenizer=lambda: self.tokenizer,
            engine_urls=lambda: self.engine_urls,
        )
        self.task_params = {one.name: one.sampling_params for one in train_datasets(config)}
        """What the datasets of `--prompt-config` say about the sampling of answers to their prompts."""
        self.eval_datasets: dict[str, Any] = {}
        self.single_eval_datasets: dict[str, Any] = {}
        """Those that a rollout file of the user evaluates on by itself."""
        _registry.bind(config.overlay.mark, self)

    @property
    def traces(self) -> bool:
        """Whether what samples go through is noted in them: dumps are where anybody would look for it."""
        return self.args.save_debug_rollout_data is not None

    def span(self, target: Any, name: str) -> AbstractContextManager[Span | None]:
        """A stretch of time in the traces of samples; nothing where nothing is traced."""
        return trace_span(target, name) if self.traces else nullcontext()

    @property
    def pool(self) -> EnginePool:
        """The engines; a run without engines must not ask."""
        if self._pool is None:
            raise RuntimeError("this run has no engines, but its rollout function wants to generate")
        return self._pool

    @property
    def engine_urls(self) -> list[str]:
        """The engines that are there now; none in a run without engines."""
        return [] if self._pool is None else self._pool.urls

    def _seats(self) -> int:
        return self.config.sglang_server_concurrency * max(1, len(self.engine_urls))

    def _engines_changed(self, state: str, url: str) -> None:
        if state in ("added", "removed"):
            self.semaphore.resize(self._seats())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of ``--hf-checkpoint``, loaded on first use."""
        return self._model.tokenizer

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of a sample's prompt; the samples of a group, which come one after the other, share the work."""
        return list(self._model.encode(prompt_text(self.tokenizer, sample)))

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that are no text: the end of a sequence, of a turn, padding."""
        return self._model.special_token_ids

    @property
    def bounds(self) -> Bounds:
        """What the model says about the samples of this run; those of an evaluation are not trained on."""
        bounds = self._model.bounds
        return Bounds(bounds.vocab_size) if evaluating.get() else bounds

    @property
    def hub(self) -> RewardHub:
        """The reward functions, created on first use."""
        settings = RewardSettings.of(self.args)
        if settings not in self._hubs:
            self._hubs[settings] = RewardHub(self.args, self._reward, args=self.plugin_args)
        return self._hubs[settings]

    def seen_by(self, args: object) -> RolloutRuntime:
        """This runtime for a call with `args`: itself, or one that differs only in what a copy of `args` says."""
        if args is self.plugin_args or args is self.args or args is self.config:
            return self
        twin = copy.copy(self)
        twin.plugin_args = self.plugin_args if isinstance(args, Config) else args
        twin.args = args if isinstance(args, Config) else changed_by(self.args, args)
        return twin

    def function(self, path: str, *, flag: str, params: Sequence[str]) -> Callable[..., Any]:
        """A plugin function by its path, loaded once; a generate function in the form that takes one sample."""
        key = (flag, path)
        if key not in self._functions:
            if flag == GENERATE_FLAG:
                self._functions[key] = as_generate(load_plugin(path, flag), lambda: self.tokenizer)
            else:
                self._functions[key] = load_function(path, what=flag, params=params)
        return self._functions[key]

    def key_of(self, url: str) -> str | None:
        """What the engine of this run at a URL asks for; None for every other URL."""
        address = urlsplit(url)
        pools = [*([] if self._pool is None else [self._pool]), *self.frozen_pools.values()]
        return next((key for pool in pools if (key := pool.key_of(f"http://{address.netloc}")) is not None), None)

    async def call_function(self, function: Callable[..., Any], who: str, *args: Any, **kwargs: Any) -> Any:
        """What a function of the user gives for a sample: an async one is awaited here, a plain one runs in a thread.

        An exit or a cancellation of its own is an error like others. The clock of the sample stands still while a
        plain function waits for a thread.
        """
        call = partial(function, *args, **kwargs)
        if is_async(function):
            return await contained(call, who)
        return await contained(partial(self._result_of, call, who), who)

    async def _result_of(self, call: Callable[[], Any], who: str) -> Any:
        with clock_stopped():
            future = await self.threads.begin(call, who)
        result = await future
        return await result if inspect.isawaitable(result) else result

    async def off_loop(self, function: Callable[..., T], who: str, *args: Any, **kwargs: Any) -> T:
        """What a plain function over several samples returns, called in a thread, within `STALL_S`.

        One is called after the other: filters and data sources of the user need no locks.
        """
        async with self._one_at_a_time:
            future = await self.threads.begin(partial(function, *args, **kwargs), who)
            result: T = await wait_for(future, who, "to return", timeout_s=STALL_S)
            return result

    @property
    def router_address(self) -> tuple[str | None, bool, str | None]:
        """The router before the engines, if there is one; whether only it takes requests; and the engines' key."""
        return self._router_url, self._router_only, self._key

    def owned(self, name: str, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> T:
        """What others keep here for as long as the run lasts: made for the first who asks, closed with the runtime."""
        if name not in self._owned:
            self._owned[name] = make(), close
        kept: T = self._owned[name][0]
        return kept

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None, *, whom: str | None = None) -> T:
        """Run a coroutine on the runtime's event loop and wait for it; `whom` says what is waited for ("rollout 3")."""
        return self.loop_thread.run(coro, timeout, whom=whom)

    async def on_own_loop(self, coro: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the runtime's event loop, from whatever loop this is called on."""
        if asyncio.get_running_loop() is self.loop_thread.loop:
            return await coro
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self.loop_thread.loop))

    def close(self) -> None:
        """Close connections, reward workers, router and loop; a second call does nothing."""
        if self.loop_thread.loop.is_closed():
            return
        with ExitStack() as last:  # what still runs in the loop finds its runtime until the loop has ended
            last.callback(_registry.unbind, self.config.overlay.mark)
            last.callback(self.loop_thread.close)
            self.run(self._aclose(), CLOSE_ALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_pool(self, urls: Sequence[str]) -> EnginePool | None:
        if not urls:
            return None
        if self._router_url is not None:
            timeout_s = self.config.engine_request_timeout
            return RoutedPool(
                urls, self._router_url, router_only=self._router_only, timeout_s=timeout_s, api_key=self._key
            )
        return EnginePool(urls, timeout_s=self.config.engine_request_timeout, api_key=self._key)

    async def _aclose(self) -> None:
        if self.state.continuous is not None:
            await _closed("generation", self.state.continuous.aclose())
        await _closed("samples in the making", self.state.cancel_held())
        while self._owned:
            name, (kept, close) = self._owned.popitem()  # last made, first closed
            if close is not None:
                await _closed(name, close(kept))
        for router in self._routers:
            await _closed("router", router.aclose())
        for name, pool in self.frozen_pools.items():
            await _closed(f"connections to {name}", pool.aclose())
        for hub in self._hubs.values():
            await _closed("reward workers", hub.aclose())
        if self._pool is not None:
            await _closed("connections to the engines", self._pool.aclose())
        self.threads.close()

    def _router_addresses(self) -> dict[str, Any]:
        if self._pool is None:
            return {}
        host, port = self._address([self._router_url] if self._router_url else self.engine_urls, self._pool)
        models: dict[str, tuple[str, int]] = {}
        for name, urls in self._model_urls.items():
            if name == next(iter(self._model_urls)):
                models[name] = (host, port)  # the model that is trained
            else:
                pool = EnginePool(urls, timeout_s=self.config.engine_request_timeout, api_key=self._key)
                self.frozen_pools[name] = pool
                models[name] = self._address(urls, pool)
        return {"sglang_router_ip": host, "sglang_router_port": port, "sglang_model_routers": models}

    def _address(self, urls: Sequence[str], pool: EnginePool) -> tuple[str, int]:
        """The only URL, or a router of our own over the pool, which knows engines that join and their keys."""
        may_grow = self.config.fleet_address is not None and pool is self._pool and self._router_url is None
        if len(urls) > 1 or not self._is_open or may_grow:
            router = Router(pool)
            self._routers.append(router)
            return self.run(router.start(), CLOSE_TIMEOUT_S)
        address = urlsplit(urls[0])
        if address.hostname is None or address.port is None:
            raise ValueError(f"an engine URL needs a host and a port: {urls[0]}")
        return address.hostname, address.port


async def _closed(what: str, closing: Awaitable[None]) -> None:
    """Closed, or left behind with a warning: what a run has made by then is whole, and a slow end takes none of it."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
    except TimeoutError:
        logger.warning("%s: not closed after %g s, and left to end with the process", what, CLOSE_TIMEOUT_S)


class _Model:
    """What the model folder says about text, read on first use."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.encode = lru_cache(maxsize=_PROMPTS_KNOWN)(lambda text: tuple(encode(self.tokenizer, text)))

    @cached_property
    def tokenizer(self) -> Any:
        if self._config.hf_checkpoint is None:
            raise UserError("there is no tokenizer without a model: args.hf_checkpoint must name its folder")
        return load_tokenizer(self._config.hf_checkpoint, trust_remote_code=self._config.trust_remote_code)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def bounds(self) -> Bounds:
        return bounds_of(self._config)


def bounds_of(config: Config) -> Bounds:
    """What the model of a run says about its samples."""
    folder = config.hf_checkpoint
    if folder is None:
        return Bounds()
    return Bounds(model_vocab_size(folder), RoutedModel.of(folder) if config.use_rollout_routing_replay else None)


class _Registry:
    """Which runtime belongs to which mark, in the order they were made."""

    def __init__(self) -> None:
        self._bound: dict[str, RolloutRuntime] = {}

    def bind(self, mark: str, runtime: RolloutRuntime) -> None:
        self._bound[mark] = runtime

    def unbind(self, mark: str) -> None:
        self._bound.pop(mark, None)

    def find(self, mark: str | None) -> RolloutRuntime | None:
        return None if mark is None else self._bound.get(mark)

    def newest_first(self) -> list[RolloutRuntime]:
        return list(reversed(self._bound.values()))


_registry = _Registry()


def runtime_for(args: object) -> RolloutRuntime:
    """The runtime that these args, or what they were copied from, belong to; going by what these args say.

    A namespace that the user wrote has no mark: it means the rollout that is running.
    """
    runtime = find_runtime(args)
    if runtime is None:
        raise LookupError(
            "no rollout is running for these args: call this from a plugin of a run, or create "
            "RolloutRuntime(config, engine_urls, dispatch=...) and use its .plugin_args"
        )
    return runtime


def find_runtime(args: object) -> RolloutRuntime | None:
    """The same; None where no rollout is running."""
    mark = args.overlay.mark if isinstance(args, Config) else run_mark(args)
    running = (one for one in _registry.newest_first() if one.is_of_run)
    runtime = next(running, None) if mark is None else _registry.find(mark)
    return None if runtime is None else runtime.seen_by(args)


def newest_runtime() -> RolloutRuntime | None:
    """The runtime bound last, for compatibility helpers that are not given args."""
    return next(iter(_registry.newest_first()), None)


def state_behind(url: str) -> GenerateState | None:
    """The rollout that the engines at this URL sample for; None for every other URL."""
    ticket = ticket_here()
    serving = [runtime.state for runtime in _registry.newest_first() if runtime.state.serves(url)]
    own = (state for state in serving if ticket is not None and state.gate is ticket.gate)
    return next(own, serving[0] if serving else None)


def key_behind(url: str) -> str | None:
    """What the engine at this URL asks for, if it is one of a run in this process."""
    found = (runtime.key_of(url) for runtime in _registry.newest_first())
    return next((key for key in found if key is not None), None)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a plugin function takes this keyword by name."""
    return name in inspect.signature(function).parameters
