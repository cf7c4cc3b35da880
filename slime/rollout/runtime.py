"""Everything rollout needs while a run lasts, in one object with one owner.

Rollout functions and plugins receive only `args`, so they find their runtime through it: `bind(args, runtime)` records
which runtime belongs to which config *object* (by identity: a copy of a config is another run's), `runtime_for(args)`
looks it up, `unbind` ends it. `RolloutRuntime` binds itself on creation and unbinds in `close`. This registry is the
only process-wide state of the room and holds nothing once all runtimes are closed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from slime.config import Config
from slime.data.tokenizer import load_tokenizer, model_vocab_size
from slime.engine.http.key import engine_key
from slime.engine.http.pool import EnginePool
from slime.engine.http.router import Router
from slime.engine.sglang.router import RoutedPool
from slime.plugins import load_function, load_plugin
from slime.rollout.adapters import as_generate
from slime.rollout.failures import FailureLog
from slime.rollout.gate import ticket_here
from slime.rollout.loop import LoopThread
from slime.rollout.report.pulse import Pulse
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.state import Dispatch, GenerateState

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0
GENERATE_FLAG = "--custom-generate-function-path"


class RolloutRuntime:
    """Engine pool, tokenizer, reward hub, plugins, concurrency limit and the event loop they live in.

    `args` is the config to hand to rollout functions: the given one plus `sglang_router_ip` and `sglang_router_port`,
    which point at `router_url` if the engines have a router, else at the only engine, or at a router of our own when
    there are several. With no engine (supervised training) those two are absent and `pool` refuses to be used.
    `router_only` engines take no requests of their own. `model_urls` are the addresses of every model that is served:
    `sglang_model_routers` has one for each. `dispatch` is what makes a finished group of a dispatched one
    (`slime.rollout.trajectory.generate_and_rm_group`).
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
    ) -> None:
        self.config = config
        self._reward = reward
        self.engine_urls = list(engine_urls)
        self.loop_thread = LoopThread()
        self.failures = FailureLog()
        self.pulse, self.eval_pulse = Pulse(), Pulse()
        self.journal: Any = None
        self._router_url, self._router_only = router_url, router_only
        self._model_urls = dict(model_urls or {})
        self._pool = self._make_pool(engine_urls)
        self._other_pools: list[EnginePool] = []
        self._routers: list[Router] = []
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}
        try:
            self.args = config.replace(carried={**config.carried, **self._router_addresses()})
        except BaseException:
            self.loop_thread.close()
            raise
        self.semaphore = asyncio.Semaphore(config.sglang_server_concurrency * max(1, len(self.engine_urls)))
        self.state = GenerateState(
            self.args,
            dispatch=dispatch,
            semaphore=self.semaphore,
            tokenizer=lambda: self.tokenizer,
            engine_urls=self.engine_urls,
        )
        self.eval_datasets: dict[str, Any] = {}
        bind(self.args, self)
        bind(config, self)

    @property
    def pool(self) -> EnginePool:
        """The engines; a run without engines must not ask."""
        if self._pool is None:
            raise RuntimeError("this run has no engines, but its rollout function wants to generate")
        return self._pool

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of ``--hf-checkpoint``, loaded on first use."""
        assert self.config.hf_checkpoint is not None, "resolve() makes sure that --hf-checkpoint is given"
        return load_tokenizer(self.config.hf_checkpoint, trust_remote_code=self.config.trust_remote_code)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that are no text: the end of a sequence, of a turn, padding."""
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def vocab_size(self) -> int | None:
        """How many token ids the model knows; None when its config does not say."""
        assert self.config.hf_checkpoint is not None, "resolve() makes sure that --hf-checkpoint is given"
        return model_vocab_size(self.config.hf_checkpoint)

    @cached_property
    def hub(self) -> RewardHub:
        """The reward functions, created on first use."""
        return RewardHub(self.args, self._reward)

    def function(self, path: str, *, flag: str, params: Sequence[str]) -> Callable[..., Any]:
        """A plugin function by its path, loaded once; a generate function in the form that takes one sample."""
        key = (flag, path)
        if key not in self._functions:
            if flag == GENERATE_FLAG:
                self._functions[key] = as_generate(load_plugin(path, flag), lambda: self.tokenizer)
            else:
                self._functions[key] = load_function(path, what=flag, params=params)
        return self._functions[key]

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None, *, whom: str | None = None) -> T:
        """Run a coroutine on the runtime's event loop and wait for it; `whom` says what is waited for ("rollout 3")."""
        return self.loop_thread.run(coro, timeout, whom=whom)

    def close(self) -> None:
        """Close connections, reward workers, router and loop; a second call does nothing."""
        if self.loop_thread.loop.is_closed():
            return
        for args in (self.args, self.config):
            if _registry.find(args) is self:
                unbind(args)
        try:
            self.run(self._aclose(), CLOSE_TIMEOUT_S)
        finally:
            self.loop_thread.close()

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
            return RoutedPool(urls, self._router_url, router_only=self._router_only, timeout_s=timeout_s)
        return EnginePool(urls, timeout_s=self.config.engine_request_timeout, api_key=engine_key(self.config))

    async def _aclose(self) -> None:
        await self.state.cancel_held()
        for router in self._routers:
            await router.aclose()
        for pool in self._other_pools:
            await pool.aclose()
        if "hub" in self.__dict__:
            await self.hub.aclose()
        if self._pool is not None:
            await self._pool.aclose()

    def _router_addresses(self) -> dict[str, Any]:
        if self._pool is None:
            return {}
        host, port = self._address([self._router_url] if self._router_url else self.engine_urls, self._pool)
        models: dict[str, tuple[str, int]] = {}
        for name, urls in self._model_urls.items():
            if name == next(iter(self._model_urls)):
                models[name] = (host, port)  # the model that is trained
            else:
                pool = EnginePool(urls, timeout_s=self.config.engine_request_timeout)
                self._other_pools.append(pool)
                models[name] = self._address(urls, pool)
        return {"sglang_router_ip": host, "sglang_router_port": port, "sglang_model_routers": models}

    def _address(self, urls: Sequence[str], pool: EnginePool) -> tuple[str, int]:
        """The only URL, or a router of our own over the pool, which also shows engines the key that they ask for."""
        if len(urls) > 1 or engine_key(self.config) is not None:
            router = Router(pool)
            self._routers.append(router)
            return self.run(router.start(), CLOSE_TIMEOUT_S)
        address = urlsplit(urls[0])
        if address.hostname is None or address.port is None:
            raise ValueError(f"an engine URL needs a host and a port: {urls[0]}")
        return address.hostname, address.port


class _Registry:
    """Which runtime belongs to which args object; keeps the object alive so that its identity stays its own."""

    def __init__(self) -> None:
        self._bound: dict[int, tuple[object, RolloutRuntime]] = {}

    def bind(self, args: object, runtime: RolloutRuntime) -> None:
        self._bound[id(args)] = (args, runtime)

    def unbind(self, args: object) -> None:
        self._bound.pop(id(args), None)

    def find(self, args: object) -> RolloutRuntime | None:
        entry = self._bound.get(id(args))
        return None if entry is None else entry[1]

    def newest_first(self) -> list[RolloutRuntime]:
        return [runtime for _, runtime in reversed(self._bound.values())]


_registry = _Registry()


def bind(args: object, runtime: RolloutRuntime) -> None:
    """Let `runtime_for(args)` find this runtime."""
    _registry.bind(args, runtime)


def unbind(args: object) -> None:
    """Forget the runtime of `args`; unknown ones are ignored."""
    _registry.unbind(args)


def runtime_for(args: object) -> RolloutRuntime:
    """The runtime bound to this very config object."""
    runtime = _registry.find(args)
    if runtime is None:
        raise LookupError(
            "no rollout runtime is bound to these args: use the args object that the rollout function was given "
            "(not a copy), or create RolloutRuntime(args, engine_urls, dispatch=...) and use its .args"
        )
    return runtime


def newest_runtime() -> RolloutRuntime | None:
    """The runtime bound last, for compatibility helpers that are not given args."""
    return next(iter(_registry.newest_first()), None)


def state_behind(url: str) -> GenerateState | None:
    """The rollout that the engines at this URL sample for; None for every other URL."""
    ticket = ticket_here()
    serving = [runtime.state for runtime in _registry.newest_first() if runtime.state.serves(url)]
    own = (state for state in serving if ticket is not None and state.gate is ticket.gate)
    return next(own, serving[0] if serving else None)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a plugin function takes this keyword by name."""
    return name in inspect.signature(function).parameters
