"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: OpenAI's dialect on top of the same requests."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from slime.engine.embedded.http.bridge import EngineBridge, Finished
from slime.engine.embedded.http.chat import chat_text, forced_call
from slime.engine.embedded.http.fields import Fields
from slime.engine.embedded.http.pieces import Piece, whole
from slime.engine.embedded.http.reply import Reading, Reply, reading_of
from slime.engine.embedded.http.requests import GenerateRequest, parse_generate
from slime.engine.embedded.http.wire import event_stream, json_answer, json_body, send_event
from slime.engine.embedded.refusals import BadRequest, is_neutral, shown
from slime.engine.embedded.sequence import Sequence
from slime.models.parsers.formats import call_opening, opens_reasoning

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
             "logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
             "no_stop_trim", "n", "spaces_between_special_tokens", "custom_params")  # fmt: skip
_READ = {*_SAMPLING, "model", "messages", "prompt", "tools", "tool_choice", "chat_template", "chat_template_kwargs",
         "seed", "min_tokens", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "rid", "stream",
         "stream_options", "separate_reasoning"}  # fmt: skip
_NEUTRAL = {"response_format": {"type": "text"}, "best_of": 1, "length_penalty": 1.0}
"""Fields that ask for what happens anyway."""
_CHANGES_TOKENS = {"response_format", "best_of", "length_penalty", "use_beam_search", "suffix", "echo", "regex", "ebnf",
                   "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                   "lora_path", "session_params", "custom_logit_processor", "continue_final_message",
                   "logits_processors", "return_hidden_states", "return_routed_experts", "functions",
                   "function_call"}  # fmt: skip
_MOST_TOKENS = 1 << 31


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
        body = await json_body(request)
        ids, reading = await asyncio.to_thread(self._chat, body)  # long chats take their time
        return await self._complete(request, body, {"input_ids": ids}, reading)

    def _chat(self, body: Fields) -> tuple[list[int], Reading]:
        facts = self._engine.loaded
        prompt = chat_text(facts.tokenizer if facts.chat_tokenizer is None else facts.chat_tokenizer(), body)
        reading = self._reading(body, prompt)
        return facts.encode(prompt + reading.opening, special=False), reading

    def _reading(self, body: Fields, prompt: str) -> Reading:
        """How the answers to this chat are to be read."""
        separate = body.flag("separate_reasoning", default=True)
        reading = reading_of(self._engine.core.options.formats, body.body, separate_reasoning=separate)
        begun = opens_reasoning(reading.formats, prompt)
        is_forced, name = forced_call(body)
        if not is_forced:
            return replace(reading, starts_in_reasoning=begun)
        if reading.formats.tool is None:
            raise BadRequest("tool_choice must be auto or none in an engine without --tool-call-parser", "tool_choice")
        opening = call_opening(reading.formats, name, starts_in_reasoning=begun)
        return replace(reading, starts_in_reasoning=begun, opening=opening)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        prompt = body.body.get("prompt")
        items = prompt if isinstance(prompt, list) else [prompt]
        if all(isinstance(item, str) for item in items):
            return await self._complete(request, body, {"text": prompt})
        if not isinstance(prompt, list):
            raise BadRequest(f"prompt must be a string, token ids, or a list of them, not {shown(prompt)}", "prompt")
        return await self._complete(request, body, {"input_ids": prompt})

    def _parse(self, body: Fields, prompt: dict[str, Any], reading: Reading | None) -> list[GenerateRequest]:
        given = body.body
        self._leave_out(given)
        params = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        for name, here in (("seed", "sampling_seed"), ("min_tokens", "min_new_tokens")):
            if given.get(name) is not None:
                params[here] = given[name]
        room = self._engine.loaded.context_len
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        params["max_new_tokens"] = body.integer(limit, room, low=0, high=_MOST_TOKENS)
        if reading is not None and reading.has_marks:
            params.setdefault("skip_special_tokens", False)  # the marks may be special tokens
        if reading is not None:
            wants, top = body.flag("logprobs"), body.integer("top_logprobs", 0, low=0, high=128)
        else:
            wants, top = "logprobs" in body, body.integer("logprobs", 0, low=0, high=128)
        request = {**prompt, "sampling_params": params, "rid": given.get("rid"), "stream": given.get("stream"),
                   "return_logprob": wants, "top_logprobs_num": top}  # fmt: skip
        return parse_generate(request, self._engine.loaded)[0]

    def _leave_out(self, given: Mapping[str, Any]) -> None:
        """Refuse what would change the tokens and is not known here; note the rest."""
        for name in sorted(given.keys() - _READ):
            is_asked = not is_neutral(given[name]) and given[name] != _NEUTRAL.get(name)
            if name in _CHANGES_TOKENS and is_asked:
                raise BadRequest(f"{name} is not supported by the embedded engine", name)
            self._engine.loaded.left_out.note(name)

    async def _complete(
        self, http: web.Request, body: Fields, prompt: dict[str, Any], reading: Reading | None = None
    ) -> web.StreamResponse:
        """Complete a prompt; an answer that is a message has a `reading`."""
        requests = self._parse(body, prompt, reading)
        chat = reading is not None
        kind = "chat.completion" if chat else "text_completion"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}" if chat else f"cmpl-{uuid.uuid4().hex}",
                "created": int(time.time()), "model": self._model}  # fmt: skip
        with self._engine.admitted(requests):
            if requests[0].stream:
                return await self._stream(http, body, requests, head, reading)
            results = await self._engine.run_all(requests)
        done = [each for finished in results for each in finished]
        rest = {"usage": _usage(results), "metadata": {"weight_version": self._engine.core.weight_version}}

        def make(texts: list[str]) -> web.Response:
            choices = [
                {**self._choice(each, text, reading), "index": at}
                for at, (each, text) in enumerate(zip(done, texts, strict=True))
            ]
            return json_answer({**head, "object": kind, "choices": choices, **rest})

        return await self._engine.answered(done, make)

    def _choice(self, finished: Finished, text: str, reading: Reading | None) -> dict[str, Any]:
        piece = whole(finished.sequence, text)
        reply = Reply(None) if reading is None else reading.reply()
        content = {"text": text} if reading is None else {"message": reply.message(text)}
        logprobs = self._logprobs(piece, finished.request, is_chat=reading is not None)
        return {**content, "finish_reason": _reason(piece, reply), "logprobs": logprobs}

    def _logprobs(
        self, piece: Piece, request: GenerateRequest, *, is_chat: bool, offset: int = 0
    ) -> dict[str, Any] | None:
        """In the shape of chats or in that of completions, whose text the piece continues at `offset`."""
        if not request.return_logprob:
            return None
        tops = piece.top or [[] for _ in piece.ids]
        named = list({*piece.ids, *(i for best in tops for _, i in best)})
        texts = self._engine.loaded.tokenizer.batch_decode([[i] for i in named]) if named else []
        words = dict(zip(named, texts, strict=True))
        if not is_chat:
            return _columns(piece, tops if request.top_logprobs else None, words, offset)
        return {
            "content": [
                {"token": words[t], "logprob": lp,
                 "top_logprobs": [{"token": words[i], "logprob": p} for p, i in best]}
                for t, lp, best in zip(piece.ids, piece.logprobs, tops, strict=True)
            ]
        }  # fmt: skip

    async def _stream(
        self,
        http: web.Request,
        body: Fields,
        requests: list[GenerateRequest],
        head: dict[str, Any],
        reading: Reading | None,
    ) -> web.StreamResponse:
        if len(requests) > 1 or requests[0].params.n > 1:
            raise BadRequest("stream takes one prompt and n = 1", "stream")
        [request] = requests
        with_usage = Fields(body.body.get("stream_options") or {}).flag("include_usage")
        kind = "text_completion" if reading is None else "chat.completion.chunk"
        reply, offset = Reply(None) if reading is None else reading.reply(), 0
        async with event_stream(http) as response:
            async for seq, piece in self._engine.pieces(request):
                said: dict[str, Any] = {"text": piece.text}
                if reading is not None:
                    said = {"delta": reply.delta(piece.text, ends=piece.finish is not None)}
                logprobs = self._logprobs(piece, request, is_chat=reading is not None, offset=offset)
                if logprobs is not None and reading is None:
                    offset += sum(map(len, logprobs["tokens"]))
                ends = {"finish_reason": _reason(piece, reply), "logprobs": logprobs}
                await send_event(response, {**head, "object": kind, "choices": [{"index": 0, **said, **ends}]})
                if piece.finish is not None and with_usage:
                    await send_event(response, {**head, "object": kind, "choices": [], "usage": _counted([[seq]])})
        return response


def _columns(
    piece: Piece, tops: list[list[tuple[float, int]]] | None, words: Mapping[int, str], offset: int
) -> dict[str, Any]:
    """Log-probs as OpenAI's completions have them. Of several tokens with one text the likeliest is named; the sampled
    one always is."""
    tokens = [words[token] for token in piece.ids]
    top = None
    if tops is not None:
        top = [
            {words[i]: p for p, i in reversed(best)} | {words[token]: logprob}
            for token, logprob, best in zip(piece.ids, piece.logprobs, tops, strict=True)
        ]
    offsets = [offset + before for before in itertools.accumulate(map(len, tokens), initial=0)][: len(tokens)]
    return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": top, "text_offset": offsets}


def _reason(piece: Piece, reply: Reply) -> str | None:
    if piece.finish is None:
        return None
    kind = str(piece.finish["type"])
    return "tool_calls" if reply.calls and kind == "stop" else kind


def _usage(results: list[list[Finished]]) -> dict[str, Any]:
    return _counted([[each.sequence for each in finished] for finished in results])


def _counted(results: list[list[Sequence]]) -> dict[str, Any]:
    """Each prompt counts once, however many samples it has."""
    prompt = sum(len(sequences[0].prompt_ids) for sequences in results)
    completion = sum(len(seq.output_ids) for sequences in results for seq in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(sequences[0].cached_tokens for sequences in results)},
    }
