"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: OpenAI's dialect on top of the same requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.data.messages import checked_messages, is_conversation
from slime.engine.embedded.http.bridge import EngineBridge
from slime.engine.embedded.http.requests import GenerateRequest, answer, parse_generate
from slime.engine.embedded.http.wire import end_stream, json_answer, json_body, open_event_stream, send_event
from slime.engine.embedded.refusals import BadRequest
from slime.engine.embedded.sequence import Sequence
from slime.errors import UserError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
             "logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
             "no_stop_trim", "n")  # fmt: skip


class OpenAIRoutes:
    def __init__(self, engine: EngineBridge) -> None:
        self._engine = engine

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self.models)
        router.add_post("/v1/chat/completions", self.chat_completions)
        router.add_post("/v1/completions", self.completions)

    @property
    def _model(self) -> str:
        return self._engine.core.options.served_model_name

    async def models(self, request: web.Request) -> web.Response:
        length = self._engine.loaded.context_len
        card = {"id": self._model, "object": "model", "owned_by": "slime", "max_model_len": length}
        return json_answer({"object": "list", "data": [card]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = (await json_body(request)).body
        ids = self._templated(body)
        return await self._complete(request, body, ids, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = (await json_body(request)).body
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise BadRequest("prompt must be a string")
        return await self._complete(request, body, self._engine.loaded.tokenizer.encode(prompt), chat=False)

    def _templated(self, body: Mapping[str, Any]) -> list[int]:
        messages, tokenizer = body.get("messages"), self._engine.loaded.tokenizer
        if not is_conversation(messages):
            raise BadRequest("messages must be a non-empty list of objects with a role")
        if tokenizer.chat_template is None:
            raise BadRequest("this model's tokenizer has no chat template: use /v1/completions or /generate")
        from jinja2.exceptions import TemplateError

        try:
            return tokenizer.apply_chat_template(
                checked_messages(messages or [], "messages"),
                tools=body.get("tools"),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except UserError as cause:
            raise BadRequest(str(cause)) from cause
        except (TemplateError, TypeError, KeyError) as cause:
            raise BadRequest(f"the chat template refused the messages: {cause}") from cause

    def _parse(self, body: Mapping[str, Any], ids: list[int], *, chat: bool) -> GenerateRequest:
        params = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        if body.get("seed") is not None:
            params["sampling_seed"] = body["seed"]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        params["max_new_tokens"] = limit if limit is not None else self._engine.loaded.context_len
        wants = body.get("logprobs")
        top = body.get("top_logprobs") or 0 if chat else (wants if isinstance(wants, int) else 0)
        request = {"input_ids": ids, "sampling_params": params, "rid": body.get("rid"), "stream": body.get("stream"),
                   "return_logprob": bool(wants), "top_logprobs_num": top}  # fmt: skip
        [parsed], _ = parse_generate(request, self._engine.loaded)
        return parsed

    async def _complete(
        self, http: web.Request, body: Mapping[str, Any], ids: list[int], *, chat: bool
    ) -> web.StreamResponse:
        request = self._parse(body, ids, chat=chat)
        kind = "chat.completion" if chat else "text_completion"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}" if chat else f"cmpl-{uuid.uuid4().hex}",
                "created": int(time.time()), "model": self._model}  # fmt: skip
        if request.stream:
            return await self._stream(http, body, request, head, chat=chat)
        sequences = await self._engine.run(request)
        choices = [self._choice(s, request, chat=chat) for s in sequences]
        return json_answer({**head, "object": kind, "choices": choices, "usage": _usage(sequences),
                                  "metadata": {"weight_version": self._engine.core.weight_version}})  # fmt: skip

    def _choice(self, seq: Sequence, request: GenerateRequest, *, chat: bool) -> dict[str, Any]:
        said = answer(seq, request, self._engine.loaded, self._engine.core.weight_version)
        content = {"message": {"role": "assistant", "content": said["text"]}} if chat else {"text": said["text"]}
        return {"index": seq.choice, **content, "finish_reason": _reason(seq), "logprobs": self._logprobs(seq, request)}

    def _logprobs(self, seq: Sequence, request: GenerateRequest) -> dict[str, Any] | None:
        if not request.return_logprob:
            return None
        decode = self._engine.loaded.tokenizer.decode
        tops = seq.output_top or [[] for _ in seq.output_ids]
        return {
            "content": [
                {"token": decode([t]), "logprob": lp,
                 "top_logprobs": [{"token": decode([i]), "logprob": p} for p, i in best]}
                for t, lp, best in zip(seq.output_ids, seq.logprobs, tops, strict=True)
            ]
        }  # fmt: skip

    async def _stream(
        self, http: web.Request, body: Mapping[str, Any], request: GenerateRequest, head: dict[str, Any], *, chat: bool
    ) -> web.StreamResponse:
        if request.params.n > 1:
            raise BadRequest("stream takes n = 1")
        response = await open_event_stream(http)
        kind = "chat.completion.chunk" if chat else "text_completion"
        sent = 0
        async for seq in self._engine.updates(request):
            text = answer(seq, request, self._engine.loaded, self._engine.core.weight_version)["text"]
            piece, sent = text[sent:], max(sent, len(text))
            delta: dict[str, Any] = {"delta": {"role": "assistant", "content": piece}} if chat else {"text": piece}
            choice = {"index": 0, **delta, "finish_reason": _reason(seq) if seq.finish else None}
            await send_event(response, {**head, "object": kind, "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await send_event(response, {**head, "object": kind, "choices": [], "usage": _usage([seq])})
        await end_stream(response)
        return response


def _reason(seq: Sequence) -> str:
    assert seq.finish is not None
    return str(seq.finish["type"])


def _usage(sequences: list[Sequence]) -> dict[str, Any]:
    prompt, completion = len(sequences[0].prompt_ids), sum(len(s.output_ids) for s in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sequences[0].cached_tokens},
    }
