"""SGLang's HTTP dialect over the engine's thread.

Invariant: every accepted request is answered exactly once, or its client is gone and the request is aborted.
Malformed requests get 400 and a reason; the engine never dies of one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

import slime
from slime.engine.embedded.core import EngineCore
from slime.engine.embedded.groups import Announced, NotArrived
from slime.engine.embedded.openai import OpenAIRoutes
from slime.engine.embedded.requests import GenerateRequest, ModelFacts, answer, parse_generate
from slime.engine.embedded.sampling_params import BadRequest
from slime.engine.embedded.sequence import Sequence
from slime.engine.embedded.weights import Conflict
from slime.engine.embedded.wire import json_body, open_event_stream, send_event

log = logging.getLogger(__name__)

_MAX_BODY = 8 << 30
_PROBE_SECONDS = 20.0
_GENERATING = ("/generate", "/health_generate", "/v1/completions", "/v1/chat/completions")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """The routes; `facts` is None until the model is loaded, and everything but /server_info answers 503 until then."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.facts: ModelFacts | None = None
        self.app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        self._add_routes()

    def _add_routes(self) -> None:
        router = self.app.router
        for path in ("/health", "/readiness"):
            router.add_get(path, self.health)
        router.add_get("/health_generate", self.health_generate)
        for path in ("/server_info", "/get_server_info"):
            router.add_get(path, self.server_info)
        for path in ("/get_model_info", "/model_info"):
            router.add_get(path, self.model_info)
        for method in ("GET", "POST"):
            router.add_route(method, "/flush_cache", self.flush_cache)
            router.add_route(method, "/get_weight_version", self.get_weight_version)
        router.add_post("/generate", self.generate)
        router.add_post("/abort_request", self.abort_request)
        router.add_post("/pause_generation", self.pause_generation)
        router.add_post("/continue_generation", self.continue_generation)
        router.add_post("/update_weights_from_disk", self.update_weights_from_disk)
        router.add_post("/update_weights_from_tensor", self.update_weights_from_tensor)
        router.add_post("/init_weights_update_group", self.init_weights_update_group)
        router.add_post("/update_weights_from_distributed", self.update_weights_from_distributed)
        router.add_post("/destroy_weights_update_group", self.destroy_weights_update_group)
        router.add_post("/weights_checker", self.weights_checker)
        router.add_post("/release_memory_occupation", self.release_memory)
        router.add_post("/resume_memory_occupation", self.resume_memory)
        OpenAIRoutes(self).add_to(router)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self.facts is None and request.path not in ("/server_info", "/get_server_info"):
                return _error(503, "the model is still loading")
            if self.core.stale is not None and request.path in _GENERATING:
                return _error(503, f"the weights are stale ({self.core.stale}): publish whole weights to this engine")
            return await handler(request)
        except Conflict as refused:
            return _error(409, str(refused))
        except NotArrived as refused:
            return _error(503, str(refused))
        except BadRequest as refused:
            return _error(400, str(refused))
        except web.HTTPException as refused:
            return _error(refused.status, refused.reason)

    # generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        requests, batched = parse_generate(await json_body(request), self.loaded)
        if requests[0].stream:
            if batched or requests[0].params.n > 1:
                raise BadRequest("stream takes one prompt and n = 1")
            return await self._stream(request, requests[0])
        results = await asyncio.gather(*(self.run(r) for r in requests))
        listed = batched or requests[0].params.n > 1
        answers = [
            answer(s, r, self.loaded, self.core.weight_version)
            for r, seqs in zip(requests, results, strict=True)
            for s in seqs
        ]
        return web.json_response(answers if listed else answers[0])

    @property
    def loaded(self) -> ModelFacts:
        assert self.facts is not None
        return self.facts

    async def run(self, request: GenerateRequest) -> list[Sequence]:
        """All samples of a request, finished; a client that goes away aborts them."""
        loop = asyncio.get_running_loop()
        left = request.params.n
        done = loop.create_future()

        def finished() -> None:
            nonlocal left
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        sequences = request.sequences(self.loaded, lambda _: loop.call_soon_threadsafe(finished))
        self.core.submit(sequences)
        try:
            await done
        except asyncio.CancelledError:
            self.core.call(lambda: self.core.abort(request.rid, "the client went away"))
            raise
        return sequences

    async def updates(self, request: GenerateRequest) -> Any:
        """An async iterator over the sequence of a streaming request: each --stream-interval tokens and at the end."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[None] = asyncio.Queue()
        [seq] = request.sequences(self.loaded, lambda _: loop.call_soon_threadsafe(news.put_nowait, None))
        self.core.submit([seq])
        told = 0
        try:
            while True:
                await news.get()
                while not news.empty():
                    news.get_nowait()
                finished = seq.finish is not None
                if not finished and len(seq.output_ids) - told < self.core.options.stream_interval:
                    continue
                told = len(seq.output_ids)
                yield seq
                if finished:
                    return
        finally:
            if seq.finish is None:
                self.core.call(lambda: self.core.abort(request.rid, "the client went away"))

    async def _stream(self, http: web.Request, request: GenerateRequest) -> web.StreamResponse:
        response = await open_event_stream(http)
        async for seq in self.updates(request):
            await send_event(response, answer(seq, request, self.loaded, self.core.weight_version))
        await response.write(b"data: [DONE]\n\n")
        return response

    # state

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generates one token: proves that the engine's thread makes progress."""
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        [parsed], _ = parse_generate(probe, self.loaded)
        if self.core.paused:
            return web.json_response({"status": "paused"})
        try:
            await asyncio.wait_for(self.run(parsed), _PROBE_SECONDS)
        except TimeoutError:
            return _error(503, f"no token within {_PROBE_SECONDS:.0f} s")
        return web.json_response({"status": "ok"})

    async def server_info(self, request: web.Request) -> web.Response:
        info: dict[str, Any] = {"version": slime.__version__, "engine": "slime-embedded", **vars(self.core.options)}
        info["status"] = "loading" if self.facts is None else "ready"
        if self.facts is not None:
            info |= await self._in_engine(self.core.info)
        return web.json_response(info)

    async def model_info(self, request: web.Request) -> web.Response:
        path = self.core.options.model_path
        return web.json_response({"model_path": path, "tokenizer_path": path, "is_generation": True,
                                  "weight_version": self.core.weight_version})  # fmt: skip

    async def get_weight_version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.core.weight_version})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._in_engine(self.core.flush_cache)
        return web.json_response({"success": True, "message": "cache flushed"})

    # control

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        if body.get("abort_all") is True:
            count = await self._in_engine(self.core.abort_all)
        elif isinstance(body.get("rid"), str):
            rid = body["rid"]
            count = await self._in_engine(lambda: self.core.abort(rid))
        else:
            raise BadRequest('give {"rid": "..."} or {"abort_all": true}')
        return web.json_response({"success": True, "aborted": count})

    async def pause_generation(self, request: web.Request) -> web.Response:
        body = await json_body(request, optional=True)
        mode = body.get("mode", "abort")
        await self._in_engine(lambda: self.core.pause(mode))
        return web.json_response({"success": True, "message": f"paused ({mode})"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self._in_engine(self.core.resume)
        return web.json_response({"success": True, "message": "continued"})

    async def release_memory(self, request: web.Request) -> web.Response:
        tags = _tags(await json_body(request, optional=True))
        await self._in_engine(lambda: self.core.release_memory(tags))
        return web.json_response({"success": True})

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = _tags(await json_body(request, optional=True))
        await self._in_engine(lambda: self.core.resume_memory(tags))
        return web.json_response({"success": True})

    # weights

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        folder = body.get("model_path")
        if not isinstance(folder, str):
            raise BadRequest("model_path must name a folder with safetensors files")
        version, flush = _version(body.get("weight_version")), body.get("flush_cache", True)
        return await self._updated(lambda: self.core.update_from_folder(folder, version, flush=flush))

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        """JSON naming safetensors files of this machine (shared memory, say), or one safetensors blob as the body."""
        if request.content_type == "application/octet-stream":
            blob = await request.read()
            version = _version(request.query.get("weight_version"))
            flush = request.query.get("flush_cache", "true") == "true"
            return await self._updated(lambda: self.core.update_from_bytes(blob, version, flush=flush))
        body = await json_body(request)
        if "serialized_named_tensors" in body:
            raise BadRequest(
                "serialized_named_tensors are pickles, which this engine never reads: send load_format "
                "safetensors_file with paths, or a safetensors body as application/octet-stream"
            )
        paths = body.get("paths", [])
        if body.get("load_format") != "safetensors_file" or not _strings(paths):
            raise BadRequest("give load_format safetensors_file and paths, a list of safetensors files")
        version, flush = _version(body.get("weight_version")), body.get("flush_cache", True)
        return await self._updated(lambda: self.core.update_from_files(paths, version, flush=flush))

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        await asyncio.to_thread(self.core.groups.join, body)  # waits for the others: not in the engine's thread
        return web.json_response({"success": True, "message": "joined"})

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        bucket = Announced.from_json(body)
        version, flush = _version(body.get("weight_version")), body.get("flush_cache", True)
        return await self._updated(lambda: self.core.update_from_group(bucket, version, flush=flush))

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        name = (await json_body(request)).get("group_name", "weight_update_group")
        self.core.groups.leave(name)
        return web.json_response({"success": True, "message": "left"})

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = (await json_body(request)).get("action", "checksum")
        found = await self._in_engine(lambda: self.core.check_weights(action))
        return web.json_response({"success": True, "message": "", **found})

    async def _updated(self, update: Callable[[], int]) -> web.Response:
        def timed() -> tuple[int, float]:
            started = time.perf_counter()
            return update(), time.perf_counter() - started

        copied, seconds = await self._in_engine(timed)
        return web.json_response(
            {
                "success": True,
                "message": f"{copied} bytes",
                "weight_version": self.core.weight_version,
                "seconds": seconds,
            }
        )

    async def _in_engine(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.core.call(function))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _tags(body: dict[str, Any]) -> list[str]:
    tags = body.get("tags") or ["weights", "kv_cache"]
    known = {"weights", "kv_cache", "cuda_graph"}
    if not _strings(tags) or not set(tags) <= known:
        raise BadRequest(f"tags must be among {', '.join(sorted(known))}, not {tags!r}")
    return tags


def _version(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise BadRequest(f"weight_version must be a string, not {value!r}")


def _strings(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
