"""sglang-router in front of SGLang servers: a guarded child process, and the pool that sends requests through it.

It forwards only generation; weight updates, aborts and pauses go directly to the servers. Invariant: after `start`
every server is a healthy worker of the router. An external router (`--sglang-router-ip`, `--sglang-router-port`) gets
the servers as workers and is left running.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from slime.cluster.ports import free_ports, require_free_port
from slime.cluster.process import ChildProcess
from slime.config import Config
from slime.engine.http.blocking import KEY_VARIABLE, NoResponse, ask
from slime.engine.http.client import EngineClient
from slime.engine.http.pool import EnginePool
from slime.engine.http.router import ROUTING_KEY_HEADER
from slime.engine.launch import Launch, engine_url
from slime.engine.sglang.installed import ROUTER, InstalledPackage, find_installed
from slime.engine.sglang.launch import (
    ROUTER_OPTIONS_OF_RUN,
    Flags,
    check_flags,
    command_with_key,
    flags_to_args,
    router_flags,
)
from slime.errors import RunFailed, UserError
from slime.storage.json_types import JsonMapping, JsonObject

FORWARDED_FIELDS = frozenset(
    {
        "input_ids",
        "text",
        "rid",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "stream",
        "return_text_in_logprobs",
        "return_hidden_states",
        "image_data",
        "priority",
        "lora_path",
        "session_params",
        "custom_logit_processor",
    }
)
FORWARDED_PARAMS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "no_stop_trim",
        "sampling_seed",
        "n",
        "ignore_eos",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "json_schema",
        "regex",
        "spaces_between_special_tokens",
    }
)
"""Sampling parameters that the router forwards. It rebuilds each request and silently drops unknown fields (found with
0.3.2: logit_bias, custom_params, stop_regex, return_routed_experts). Of this list it drops only
spaces_between_special_tokens, which changes the text of slow tokenizers but no token."""
_POLL_S = 0.2
_LOG_LEVELS = {"warning": "warn", "info": "warn", "debug": "info", "error": "error"}
"""The router's log level for each of ours. Its info level writes several lines per request, like our debug level."""


def external_router(config: Config) -> str | None:
    """URL of an external router; None without `--sglang-router-ip`."""
    host, port = (config.carried.get(name) for name in ("sglang_router_ip", "sglang_router_port"))
    if host is None:
        return None
    if port is None:
        raise UserError("--sglang-router-ip needs --sglang-router-port: together they name a running router")
    return f"http://{host}:{port}"


def find_router(config: Config) -> InstalledPackage | None:
    """sglang-router with its options; None if it is not installed."""
    return find_installed(ROUTER, _router_python(config))


def installed_router(config: Config) -> InstalledPackage:
    """sglang-router for a run that uses it; raises if it is not installed or a `--router-*` flag is invalid."""
    installed = find_router(config)
    if installed is None:
        raise UserError(router_not_installed(config))
    check_flags(router_flags(config), installed, prefix="router", taken=ROUTER_OPTIONS_OF_RUN)
    return installed


class RouterDied(RunFailed):
    """The router process ended unexpectedly."""


class SglangRouter:
    """The router of one model. It sends `key` to the engines and requires the same key, since it also accepts
    workers."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: str | os.PathLike[str],
        name: str = "router",
        disaggregated: bool = False,
        is_first: bool = True,
        key: str,
    ) -> None:
        self._config = config
        self.key = key
        self._name = name
        self._log_path = Path(run_dir) / "logs" / f"{name}.log"
        self._disaggregated = disaggregated
        self._is_first = is_first  # `--sglang-router-ip` and `--sglang-router-port` apply to the first model's router
        self._external = external_router(config) if is_first else None
        self._installed = None if self._external else installed_router(config)
        self._process: ChildProcess | None = None
        self._added: list[str] = []
        self.url = self._external or ""
        self.is_ours = self._external is None

    def start(self, engines: Sequence[Launch]) -> str:
        """Start the router and give it the engines; returns its URL."""
        try:
            if self._installed is not None:
                self._start_process(self._installed)
            self._wait(lambda: ask("GET", f"{self.url}/liveness")[0] == 200, "answer /liveness")
            for engine in engines:
                self.add_worker(engine.url, engine.worker_type, engine.bootstrap_port)
            expected = {engine.url for engine in engines}
            self._wait(
                lambda: expected <= {worker["url"] for worker in self.workers() if worker["is_healthy"]},
                f"accept its {len(expected)} workers",
            )
            self._wait(lambda: ask("GET", f"{self.url}/readiness")[0] == 200, "answer /readiness")
        except BaseException:
            self.stop()
            raise
        return self.url

    def add_worker(self, url: str, worker_type: str = "regular", bootstrap_port: int | None = None) -> None:
        """Add an engine to the router, which checks the engine's health before it uses it."""
        body: JsonObject = {"url": url, "worker_type": worker_type}
        if bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        body["api_key"] = self.key
        self._command("POST", "/workers", body)
        self._added.append(url)

    def remove_worker(self, url: str) -> None:
        """Remove an engine from the router; does nothing if the router does not know it."""
        for worker in self.workers():
            if worker["url"] == url:
                self._command("DELETE", f"/workers/{worker['id']}", None)
        self._added = [added for added in self._added if added != url]

    def workers(self) -> list[JsonObject]:
        """The workers, as the router lists them."""
        return list(self._command("GET", "/workers", None)["workers"])

    def check(self) -> None:
        """Raise if the router has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RouterDied(
                f"{self._name} ended with code {code}; the end of {self._log_path}:\n{self._process.tail()}"
            )

    def stop(self) -> None:
        """Stop the router, or remove our engines from an external one. Idempotent."""
        if self._process is not None:
            self._process.stop()
        elif self._added:
            for url in list(self._added):
                self.remove_worker(url)

    def _start_process(self, installed: InstalledPackage) -> None:
        """Start the router process. Its circuit breaker is off unless `--router-cb-*` configures it: the run monitors
        its engines itself, and on a busy machine ten aborted connections would refuse all requests for a minute."""
        config = self._config
        port, metrics_port = free_ports(2, config.host)
        requested = config.carried.get("sglang_router_port") if self._is_first else None
        if requested is not None:
            port = require_free_port(int(requested), config.host, flag="--sglang-router-port")
        flags: Flags = {
            "host": config.host,
            "port": port,
            "prometheus-host": config.host,
            "prometheus-port": metrics_port,
            "log-level": _LOG_LEVELS[config.log_level],
            "request-timeout-secs": int(config.engine_request_timeout),
            "worker-startup-timeout-secs": int(config.engine_start_timeout),
            "pd-disaggregation": self._disaggregated,
            "disable-circuit-breaker": not any(name.startswith("cb-") for name in router_flags(config)),
        }
        words = flags_to_args(
            {name: value for name, value in flags.items() if name in installed.options} | router_flags(config),
            installed,
        )
        argv = command_with_key(installed.python, "sglang_router.launch_router", words)
        self.url = engine_url(config.host, port)
        self._process = ChildProcess(
            self._name, argv, env={KEY_VARIABLE: self.key}, pass_env=config.pass_env or (), log_path=self._log_path
        ).start()

    def _command(self, method: str, path: str, body: JsonObject | None) -> Any:
        try:
            status, answer = ask(method, self.url + path, body, api_key=self.key)
        except NoResponse as error:
            self.check()
            raise RunFailed(f"{self._name} at {self.url} did not answer {path}: {error}") from error
        if status >= 300:
            raise RunFailed(f"{self._name} at {self.url} refused {method} {path} with status {status}: {answer}")
        return answer

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._config.engine_start_timeout
        while True:
            self.check()
            try:
                if condition():
                    return
                reason = "it is not ready"
            except NoResponse as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{self._name} at {self.url} did not {what} within {self._config.engine_start_timeout:g} s "
                    f"({reason}); its log is {self._log_path}"
                )
            time.sleep(_POLL_S)


class RoutedPool(EnginePool):
    """Pool of engines behind a router: sends generation requests to the router, all other calls to the engines.

    The affinity key is sent as a header, for router policies that use it. Two kinds of generation requests go directly
    to the engines: the resumable ones of a fault-tolerant run, because the router hides which engine failed; and those
    with fields that the router would drop, unless only the router can serve them (`router_only`: prefill and decode
    servers).
    """

    def __init__(
        self,
        urls: Sequence[str],
        router_url: str,
        *,
        router_only: bool = False,
        timeout_s: float = 3600.0,
        api_key: str | None = None,
    ) -> None:
        super().__init__(urls, timeout_s=timeout_s, api_key=api_key)
        self._front = EnginePool([router_url], timeout_s=timeout_s, api_key=api_key)
        self._router_only = router_only

    @property
    def router(self) -> EngineClient:
        """Client of the router."""
        return self._front.clients[0]

    def _route(
        self, payload: JsonMapping, affinity_key: Hashable | None, *, is_resumable: bool = False
    ) -> tuple[EnginePool, dict[str, str] | None]:
        if not self._router_only and (is_resumable or not forwards_all_fields(payload)):
            return self, None
        return self._front, _routing_headers(None, affinity_key)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        call: str,
        affinity_key: Hashable | None = None,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._front.open(
            method, call, data=data, headers=_routing_headers(headers, affinity_key)
        ) as response:
            yield response

    async def aclose(self) -> None:
        await self._front.aclose()
        await super().aclose()


def forwards_all_fields(payload: JsonMapping) -> bool:
    """Return true if sglang-router forwards every field of a request that affects its response."""
    params = payload.get("sampling_params") or {}
    each = params if isinstance(params, list) else [params]
    return payload.keys() <= FORWARDED_FIELDS and all(one.keys() <= FORWARDED_PARAMS for one in each)


def _routing_headers(headers: dict[str, str] | None, key: Hashable | None) -> dict[str, str] | None:
    return headers if key is None else {ROUTING_KEY_HEADER: str(key), **(headers or {})}


def _router_python(config: Config) -> str | None:
    return config.sglang_router_python or config.sglang_python


def router_not_installed(config: Config) -> str:
    """Error message for a run that needs sglang-router without having it."""
    where = _router_python(config) or "this interpreter"
    return (
        f"--rollout-router sglang: sglang-router is not installed in {where}; pip install sglang-router there, name "
        "an interpreter that has it with --sglang-router-python, or use --rollout-router builtin"
    )
