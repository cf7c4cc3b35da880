"""A test engine that loads safetensors files over HTTP, and a source that writes them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from slime.engine.http.client import EngineClient


class Engine:
    """The weight routes of an engine; `calls` records their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.version = "default"
        self.tensors: dict[str, torch.Tensor] = {}
        self.fail_on: str | None = None
        self.stuck_version: str | None = None
        self.is_sglang = False
        self.client: EngineClient

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/pause_generation", self.plain),
                web.post("/continue_generation", self.plain),
                web.post("/update_weights_from_tensor", self.from_tensor),
                web.post("/update_weights_from_disk", self.from_disk),
                web.get("/get_weight_version", self.weight_version),
                web.get("/model_info", self.model_info),
            ]
        )
        return app

    async def note(self, request: web.Request) -> None:
        self.calls.append(request.path.strip("/"))
        self.bodies.append(await request.json() if request.can_read_body else None)
        if self.fail_on == self.calls[-1]:
            raise web.HTTPInternalServerError(text=json.dumps({"error": {"message": "no luck"}}))

    async def plain(self, request: web.Request) -> web.Response:
        await self.note(request)
        return web.json_response({"status": "ok"})

    async def from_tensor(self, request: web.Request) -> web.Response:
        await self.note(request)
        body = await request.json()
        assert body["load_format"] == "safetensors_file"
        return self.load([Path(path) for path in body["paths"]], body["weight_version"])

    async def from_disk(self, request: web.Request) -> web.Response:
        await self.note(request)
        body = await request.json()
        folder = Path(body["model_path"])
        assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
        response = self.load([folder / name for name in names], body["weight_version"])
        assert set(index["weight_map"]) == set(self.tensors)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in self.tensors.values())
        return response

    def load(self, paths: Sequence[Path], version: str) -> web.Response:
        self.tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        self.version = version
        return web.json_response({"success": True, "message": "loaded"})

    async def weight_version(self, request: web.Request) -> web.Response:
        await self.note(request)
        if self.is_sglang:
            raise web.HTTPNotFound(text=json.dumps({"detail": "use /model_info"}))
        return web.json_response({"weight_version": self.stuck_version or self.version})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.stuck_version or self.version})


class LocalSource:
    """A weight source whose verbs are its own methods, as one rank."""

    def call(self, verb: str, **params: Any) -> list[Any]:
        return [getattr(self, verb)(**params)]


class Source(LocalSource):
    """Exports two buckets whose values encode the version."""

    def __init__(self) -> None:
        self.fail = False

    def export_weights(self, out_dir: str, version: int) -> list[str]:
        paths = []
        for bucket in range(2):
            path = f"{out_dir}/bucket-{bucket}.safetensors"
            save_file({f"layer.{bucket}.weight": torch.full((4, 8), float(version * 10 + bucket))}, path)
            paths.append(path)
            if self.fail:
                raise OSError("no space left")
        return paths


class Loop:
    """An event loop in a thread, like that of the rollout runtime."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def __call__(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result(240)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def run_async() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def engines(run_async: Loop) -> Iterator[list[Engine]]:
    engines = [Engine(), Engine()]
    runners = []

    async def start(engine: Engine) -> None:
        runner = web.AppRunner(engine.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        engine.client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=240)

    async def stop() -> None:
        for engine in engines:
            await engine.client.aclose()
        for runner in runners:
            await runner.cleanup()

    for engine in engines:
        run_async(start(engine))
    yield engines
    run_async(stop())


@pytest.fixture
def source() -> Source:
    return Source()
