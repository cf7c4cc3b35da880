"""The engines that must keep the contract, and the transports that must reach them.

`make test` runs them against the embedded engine. If `SLIME_SGLANG_PYTHON` names an interpreter with SGLang, as
`make test-sglang` sets it, they run against SGLang: no test is skipped, and a server that does not start fails the
tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from slime.config import Config
from slime.engine.fleet.processes import EngineFleet
from slime.engine.http.blocking import authorization
from slime.engine.http.client import EngineClient
from tests.e2e.runs import wait_until

SGLANG_PYTHON = os.environ.get("SLIME_SGLANG_PYTHON")
ROUTER_PYTHON = os.environ.get("SLIME_ROUTER_PYTHON")
ENGINES = ("sglang",) if SGLANG_PYTHON else ("embedded",)
TRANSPORTS: dict[str, dict[str, Any]] = {
    "disk": {"update_weight_transport": "disk"},
    "tensor": {"update_weight_transport": "tensor"},
    "nccl": {"update_weight_transport": "nccl"},
    "delta": {"update_weight_transport": "disk", "update_weight_mode": "delta"},
}
"""Weight transports that every engine of `ENGINES` must support, with the flags that select them."""

T = TypeVar("T")


def engine_flags(kind: str) -> dict[str, Any]:
    """The flags that make a run use this engine."""
    flags: dict[str, Any] = {"rollout_backend": kind, "device": "cpu"}
    if kind == "sglang":
        flags |= {"sglang_python": SGLANG_PYTHON, "sglang_router_python": ROUTER_PYTHON}
    return flags


class Engine:
    """One running engine, started the way a run starts it, with its client and plain HTTP calls."""

    def __init__(self, kind: str, model: Path, run_dir: Path) -> None:
        self.kind = kind
        config = Config(hf_checkpoint=str(model), rollout_num_gpus=1, log_level="info", **engine_flags(kind))
        self.fleet = EngineFleet(config, device="cpu", run_dir=run_dir, model_path=model)
        [self.url] = self.fleet.start()
        self._asked: list[Future[Any]] = []

    def call(self, use: Callable[[EngineClient], Any]) -> Any:
        """Run the coroutine of `use(client)` and return its result."""

        async def once() -> Any:
            async with EngineClient(
                self.url, timeout_s=120.0, control_timeout_s=120.0, api_key=self.fleet.key
            ) as client:
                return await use(client)

        return asyncio.run(once())

    def generate(self, input_ids: list[int], *, rid: str | None = None, **params: Any) -> Any:
        """Return the parsed answer with its log-probs."""
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}
        status, answer = self.post("/generate", body if rid is None else {**body, "rid": rid})
        assert status == 200, answer
        return answer

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **authorization(self.fleet.key)}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=authorization(self.fleet.key))
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def in_background(self, function: Callable[[], T]) -> Future[T]:
        asked = ThreadPoolExecutor(1).submit(function)
        self._asked.append(asked)
        return asked

    def settle(self) -> None:
        """End the requests that a test has left: weights may only be loaded into an idle or paused engine."""
        left = [asked for asked in self._asked if not asked.done()]
        self._asked.clear()
        if left:
            self.call(lambda client: client.continue_())
            self.call(lambda client: client.abort(abort_all=True))
            wait(left, timeout=240)

    def load(self, folder: Path, version: str, *, flush_cache: bool = True) -> None:
        self.call(lambda client: client.update_weights_from_disk(folder, version, flush_cache=flush_cache))

    def version(self) -> str:
        return str(self.get("/model_info")["weight_version"])


def after_first_tokens(engine: Engine, *asked: Future[Any]) -> None:
    """Wait until these requests are being decoded or one is done; for SGLang, which reports late, sleep briefly."""
    if engine.kind != "embedded":
        time.sleep(0.4)
        return

    def load() -> dict[str, int]:
        found: dict[str, int] = engine.get("/v1/loads?include=core")["loads"][0]
        return found

    def is_any_done() -> bool:
        return any(one.done() for one in asked)

    assert wait_until(lambda: is_any_done() or load()["num_running_reqs"] >= len(asked), 120)
    before = load()["generated_tokens"]
    assert wait_until(lambda: is_any_done() or load()["generated_tokens"] > before + len(asked), 120)
