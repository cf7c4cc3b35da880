"""The server of SGLang's HTTP dialect.

Invariant: a malformed request gets status 400 with the reason, and never ends the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

import slime
from slime.cluster.http_checks import Refusal, carries_key, foreign, not_json
from slime.cluster.http_server import Connections
from slime.engine.embedded.engine import PAUSE_MODES
from slime.engine.embedded.errors import BadRequest, BucketNotReceived
from slime.engine.embedded.http.async_engine import EngineBridge, FinishedSequence, run_in_daemon_thread
from slime.engine.embedded.http.openai import OpenAIRoutes
from slime.engine.embedded.http.requests import (
    GenerateRequest,
    RequestField,
    group_name,
    json_body,
    memory_tags,
    parse_bucket,
    parse_generate,
    rendezvous,
    shared_memory,
)
from slime.engine.embedded.http.responses import (
    TokenJson,
    answer,
    column_answer,
    error_answer,
    event_stream,
    json_answer,
    send_event,
    whole,
)
from slime.storage.json_types import JsonMapping, JsonObject

T = TypeVar("T")

log = logging.getLogger(__name__)

_MAX_BLOB = 8 << 30  # weights in a request body
_BLOBS_AT = "/update_weights_from_tensor"
_BLOB = "application/octet-stream"
_PROBE_SECONDS = 20.0
_LOOK_SECONDS = 0.02
_COLUMNS_HEADER = "X-Slime-Columns"  # the tokens of an answer as columns, for slime's own client
_GENERATING = ("/generate", "/health_generate", "/v1/completions", "/v1/chat/completions")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """The routes; all except /server_info return status 503 until the model is loaded.

    `connections`: the server's connections, if their number is limited.
    """

    def __init__(self, engine: EngineBridge, connections: Connections | None = None) -> None:
        self.core = engine.core
        self._engine = engine
        middlewares = [self._guard] if connections is None else [self._guard, connections.served]
        self.app = web.Application(client_max_size=engine.core.options.max_body_mb << 20, middlewares=middlewares)
        openai, router = OpenAIRoutes(engine), self.app.router
        gets: dict[str, Handler] = {
            **dict.fromkeys(("/health", "/readiness"), self.health),
            "/health_generate": self.health_generate,
            **dict.fromkeys(("/server_info", "/get_server_info"), self.server_info),
            **dict.fromkeys(("/model_info", "/get_model_info"), self.model_info),
            "/workers": self.workers,
            "/v1/loads": self.loads,
            "/v1/models": openai.models,
        }
        posts: dict[str, Handler] = {
            "/generate": self.generate,
            "/v1/chat/completions": openai.chat_completions,
            "/v1/completions": openai.completions,
        }
        controls: dict[str, Handler] = {
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/update_weights_from_disk": self.update_weights_from_disk,
            _BLOBS_AT: self.update_weights_from_tensor,
            "/init_weights_update_group": self.init_weights_update_group,
            "/update_weights_from_distributed": self.update_weights_from_distributed,
            "/destroy_weights_update_group": self.destroy_weights_update_group,
            "/update_weights_from_handle": self.update_weights_from_handle,
            "/load_lora_adapter": self.load_lora_adapter,
            "/unload_lora_adapter": self.unload_lora_adapter,
            "/weights_checker": self.weights_checker,
        }
        for path, handler in gets.items():
            router.add_get(path, handler)
        for path, handler in (posts | controls).items():
            router.add_post(path, handler)
        for method in ("GET", "POST"):
            router.add_route(method, "/flush_cache", self.flush_cache)
            router.add_route(method, "/get_weight_version", self.get_weight_version)
        self._open = {*gets, *posts, "/get_weight_version"}
        """Routes without effect on later answers. All other routes are control routes, which require the key."""

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if (refused := self._refusal(request)) is not None:
                return error_answer(refused.status, refused.message)
            if self._engine.facts is None and request.path not in ("/server_info", "/get_server_info"):
                return error_answer(503, "the model is still loading")
            if request.path in _GENERATING and (stale := self.core.weights.stale) is not None:
                return error_answer(503, f"the weights are stale ({stale}): publish whole weights to this engine")
            return await handler(request)
        except BadRequest as refused:
            return error_answer(refused.status, str(refused), refused.param)
        except web.HTTPException as refused:
            return error_answer(refused.status, refused.reason)
        except (ConnectionError, web.RequestPayloadError) as cause:  # the client disconnected and reads no answer
            return error_answer(400, f"the request is incomplete: {cause}")
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return error_answer(500, f"this request failed in the engine ({type(error).__name__}: {error})")

    def _refusal(self, request: web.Request) -> Refusal | None:
        """Check a request's key, its origin and the type of its body; None if it may be served.

        Health routes need no key, as with SGLang, and the key of the control routes is valid for all routes.
        """
        resource = request.match_info.route.resource
        if request.path.startswith("/health"):
            return None
        options, is_open = self.core.options, resource is None or resource.canonical in self._open
        control = options.admin_api_key or options.api_key
        keys = (options.api_key, control) if is_open else (control,)
        if not any(carries_key(request.headers, key) for key in keys):
            if options.api_key is not None or not is_open:
                return Refusal(401, "give the API key of this engine: Authorization: Bearer KEY")
            if (cross_site := foreign(request.headers, names=(options.host,))) is not None:
                return cross_site
        takes_blobs = request.path == _BLOBS_AT and request.content_type == _BLOB
        return None if takes_blobs else not_json(request)

    # generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        requests, batched = parse_generate((await json_body(request)).value, self._engine.loaded)
        if requests[0].stream:
            if batched or requests[0].params.n > 1:
                raise BadRequest("stream takes one prompt and n = 1")
            with self._engine.admitted(requests):
                return await self._stream(request, requests[0])
        writes = _COLUMNS_HEADER not in request.headers
        with self._engine.admitted(requests):
            done = await self._engine.run(requests, writes=writes)
        version, is_list = self.core.weight_version, batched or requests[0].params.n > 1

        def make(texts: list[str]) -> web.Response:
            answers = []
            for each, text in zip(done, texts, strict=True):
                seq, written = each.sequence, each.written
                if written is None:
                    answers.append(column_answer(seq, whole(seq, text), each.request, version))
                else:
                    written.catch_up(seq)
                    answers.append(answer(seq, whole(seq, text), each.request, version, written))
            return json_answer(answers if is_list else answers[0])

        return await self._engine.writer.make([each.sequence for each in done], make)

    async def _stream(self, http: web.Request, request: GenerateRequest) -> web.StreamResponse:
        """Send events with the whole answer so far, as SGLang does, or with the new part if its flag is set."""
        only_new, so_far, written = self.core.options.incremental_streaming_output, None, TokenJson()
        async with event_stream(http) as response:
            async for seq, piece in self._engine.pieces(request):
                if only_new:
                    written = TokenJson()
                written.take(piece.ids, piece.logprobs)
                if only_new or so_far is None:
                    so_far = piece
                else:
                    so_far.join(piece)
                await send_event(response, answer(seq, so_far, request, self.core.weight_version, written))
        return response

    # state

    async def health(self, request: web.Request) -> web.Response:
        return json_answer({"status": "ok"})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Check that the engine's thread makes progress: it computes any token within the time limit.

        Tokens of other requests count too, also those of one that keeps all others waiting; an idle engine generates
        a token for the check.
        """
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        probe: asyncio.Future[list[FinishedSequence]] | None = None
        began, deadline = self.core.steps.counters.computed, time.monotonic() + _PROBE_SECONDS
        try:
            while time.monotonic() < deadline:
                if self.core.halted:
                    return json_answer({"status": "paused"})
                if self.core.steps.counters.computed > began:
                    return json_answer({"status": "ok"})
                if probe is None and self.core.scheduler.idle:
                    one_token, _ = parse_generate(body, self._engine.loaded)
                    probe = asyncio.ensure_future(self._engine.run(one_token))
                if probe is not None and probe.done():
                    probe.result()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            if probe is not None:
                probe.cancel()
        return error_answer(503, f"no token within {_PROBE_SECONDS:.0f} s")

    async def server_info(self, request: web.Request) -> web.Response:
        info: JsonObject = {"version": slime.__version__, "engine": "slime-embedded", **vars(self.core.options)}
        del info["api_key"], info["admin_api_key"]
        info["status"] = "loading" if self._engine.facts is None else "ready"
        if self._engine.facts is not None:
            info |= await self._call(self.core.info, meets_steps=True)
        return json_answer(info)

    async def loads(self, request: web.Request) -> web.Response:
        """Return the numbers of requests in SGLang's form, which has one entry for each data-parallel rank."""
        info = await self._call(self.core.info, meets_steps=True)
        running, waiting = info["num_running_reqs"], info["num_waiting_reqs"]
        rank = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
        rank |= {"num_total_reqs": running + waiting, "generated_tokens": info["totals"]["generated_tokens"]}
        return json_answer({"loads": [rank]})

    async def workers(self, request: web.Request) -> web.Response:
        """Answer a router's request for its workers: a single engine without a router lists itself."""
        return json_answer({"workers": [{"id": "0", "url": f"{request.scheme}://{request.host}"}]})

    async def model_info(self, request: web.Request) -> web.Response:
        path = self.core.options.model_path
        return json_answer({"model_path": path, "tokenizer_path": path, "is_generation": True,
                                  "weight_version": self.core.weight_version})  # fmt: skip

    async def get_weight_version(self, request: web.Request) -> web.Response:
        return json_answer({"weight_version": self.core.weight_version})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._call(self.core.flush_cache)
        return json_answer({"success": True, "message": "cache flushed"})

    # control

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        if body["abort_all"].flag():
            count = await self._call(self.core.abort_all, meets_steps=True)
        elif (rid := body["rid"].optional_text()) is not None:
            count = await self._call(lambda: self.core.abort(rid), meets_steps=True)
        else:
            raise BadRequest('give {"rid": "..."} or {"abort_all": true}')
        return json_answer({"success": True, "aborted": count})

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await json_body(request, optional=True))["mode"].one_of(PAUSE_MODES, "abort")
        await self._call(lambda: self.core.pause(mode))
        return json_answer({"success": True, "message": f"paused ({mode})"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self._call(self.core.resume)
        return json_answer({"success": True, "message": "continued"})

    async def release_memory(self, request: web.Request) -> web.Response:
        body = await json_body(request, optional=True)
        tags, discard = memory_tags(body), body["discard_weights"].flag(False)
        await self._call(lambda: self.core.release_memory(tags, discard_weights=discard))
        return json_answer({"success": True})

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = memory_tags(await json_body(request, optional=True))
        await self._call(lambda: self.core.resume_memory(tags))
        return json_answer({"success": True})

    # weights

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        folder, version, flush = body["model_path"].text(), *_version_and_flush(body)
        return await self._run_update(lambda: self.core.weights.update_from_folder(folder, version, flush=flush))

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        """Load safetensors files of this machine that the JSON names, or the safetensors blob in the body."""
        if request.content_type == _BLOB:
            blob = await request.clone(client_max_size=_MAX_BLOB).read()
            version = request.query.get("weight_version")
            flush = request.query.get("flush_cache", "true") == "true"
            return await self._run_update(lambda: self.core.weights.update_from_bytes(blob, version, flush=flush))
        body = await json_body(request)
        if "serialized_named_tensors" in body:
            raise BadRequest(
                "serialized_named_tensors are pickles, which this engine never reads: send load_format "
                "safetensors_file with paths, or a safetensors body as application/octet-stream"
            )
        if body["load_format"].optional_text() != "safetensors_file" or not (paths := body["paths"].texts()):
            raise BadRequest("give load_format safetensors_file and paths, a list of safetensors files")
        version, flush = _version_and_flush(body)
        return await self._run_update(lambda: self.core.weights.update_from_files(paths, version, flush=flush))

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        meeting = rendezvous(await json_body(request))
        await run_in_daemon_thread(lambda: self.core.groups.join(meeting))  # waits for the other ranks, maybe minutes
        return json_answer({"success": True, "message": "joined"})

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        bucket = parse_bucket(body)
        version, flush = _version_and_flush(body)
        await self._call(lambda: self.core.weights.expect_from_group(bucket, version), meets_steps=True)
        try:
            tensors = await asyncio.wrap_future(self.core.groups.receive(bucket, self.core.runner.device))
            return await self._run_update(
                lambda: self.core.weights.update_from_group(bucket, tensors, version, flush=flush)
            )
        except (BucketNotReceived, asyncio.CancelledError):  # the bucket is lost; cancelled: its sender disconnected
            self.core.call(lambda: self.core.weights.fail_partial_update(bucket.group_name))
            raise

    async def update_weights_from_handle(self, request: web.Request) -> web.Response:
        """Copy a bucket from the memory of a process on this machine (`slime.engine.embedded.weights.ipc`).

        It is opened outside of the engine's thread, which is interrupted for the copy only.
        """
        body = await json_body(request)
        memory, bucket = shared_memory(body), parse_bucket(body)
        version, flush = _version_and_flush(body)
        mode = body["pause_mode"].one_of(PAUSE_MODES, "abort") if "pause_mode" in body else None
        weights = self.core.weights
        opened = await asyncio.to_thread(weights.shared.open, memory, bucket)
        try:
            return await self._run_update(
                lambda: weights.apply(opened.load, version, flush=flush, names=bucket.names, bucket=bucket),
                opened.seconds,
                pause_mode=mode,
            )
        finally:
            await asyncio.to_thread(opened.close)

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        name = group_name(await json_body(request))
        await run_in_daemon_thread(lambda: self.core.groups.leave(name))
        await self._call(lambda: self.core.weights.fail_partial_update(name))
        return json_answer({"success": True, "message": "left"})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        """Load an adapter: SGLang's fields and an update's. There is one at a time, for all requests."""
        body = await json_body(request)
        name, folder = body["lora_name"].text(), body["lora_path"].text()
        version, flush = _version_and_flush(body)
        return await self._run_update(
            lambda: self.core.weights.load_adapter(name, folder, version, flush=flush),
            {"loaded_adapters": {name: folder}},
        )

    async def unload_lora_adapter(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        name = body["lora_name"].text()
        version, flush = _version_and_flush(body)
        return await self._run_update(
            lambda: self.core.weights.unload_adapter(name, version, flush=flush), {"loaded_adapters": {}}
        )

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = (await json_body(request))["action"].one_of(("checksum", "shapes"), "checksum")
        found = await self._call(lambda: self.core.weights.check(action))
        return json_answer({"success": True, "message": "", **found})

    async def _run_update(
        self, load: Callable[[], int], more: JsonMapping | None = None, *, pause_mode: str | None = None
    ) -> web.Response:
        """Update the weights in the engine's thread; `more` has additional fields of the answer."""
        core = self.core
        copied, seconds = await asyncio.wrap_future(core.call(lambda: core.update(load, pause_mode)))
        answer = {"success": True, "message": f"{copied} bytes", "weight_version": self.core.weight_version}
        return json_answer({**answer, "seconds": seconds, **(more or {})})

    async def _call(self, function: Callable[[], T], *, meets_steps: bool = False) -> T:
        """Run `function` in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.core.call(function, meets_steps=meets_steps))


def _version_and_flush(body: RequestField) -> tuple[str | None, bool]:
    return body["weight_version"].optional_text(), body["flush_cache"].flag(True)
