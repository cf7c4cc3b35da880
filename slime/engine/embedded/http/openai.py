"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: OpenAI's dialect on top of `GenerateRequest`.

The text of a chat's prompt is what the model's own chat template makes of `messages`, `tools` and
`chat_template_kwargs`. Invariant: a request chooses the template's variables, never the template or how it is applied.

An answer to a chat is parsed into a message, whole or in the pieces of a stream. Invariant: the pieces of a stream,
joined, are the message of the whole answer, except for a tool call that breaks off after its name: its beginning was
sent, and all of it follows as text.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson
from aiohttp import web
from jinja2.exceptions import TemplateError

from slime.data.chat_template import is_conversation, normalize_messages
from slime.engine.embedded.errors import BadRequest, is_neutral, shown
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.requests import GenerateRequest, RequestField, json_body, parse_generate
from slime.engine.embedded.http.responses import OutputPiece, event_stream, json_answer, send_event, whole
from slime.engine.embedded.scheduler import Sequence as EngineSequence
from slime.errors import UserError
from slime.models.openai_api import call_json, function_names, usage_json
from slime.models.parsers.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    OutputParser,
    Reasoning,
    Text,
    gathered,
)
from slime.models.parsers.formats import Formats, call_opening, make_parser, opens_reasoning
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedTokenizerBase

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
             "logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
             "no_stop_trim", "n", "spaces_between_special_tokens", "custom_params")  # fmt: skip
_KNOWN_FIELDS = {*_SAMPLING, "model", "messages", "prompt", "tools", "tool_choice", "chat_template",
                 "chat_template_kwargs",
         "seed", "min_tokens", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "rid", "stream",
         "stream_options", "separate_reasoning"}  # fmt: skip
_NEUTRAL = {"response_format": {"type": "text"}, "best_of": 1, "length_penalty": 1.0}
"""Values that ask for the default behaviour."""
_CHANGES_TOKENS = {"response_format", "best_of", "length_penalty", "use_beam_search", "suffix", "echo", "regex", "ebnf",
                   "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                   "lora_path", "session_params", "custom_logit_processor", "continue_final_message",
                   "logits_processors", "return_hidden_states", "return_routed_experts", "functions",
                   "function_call"}  # fmt: skip
_MOST_TOKENS = 1 << 31


def render_chat(tokenizer: PreTrainedTokenizerBase, fields: RequestField) -> str:
    """Render the prompt of a chat request, up to where the assistant's message begins."""
    if tokenizer.chat_template is None:
        raise BadRequest("this model's tokenizer has no chat template: use /v1/completions or /generate")
    if "chat_template" in fields:
        raise BadRequest("chat_template: this engine uses the model's own template", "chat_template")
    messages, tools = _messages(fields), _tools(fields)
    extra = fields["chat_template_kwargs"].object(optional=True)
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    if taken := sorted(reserved & extra.keys()):
        raise fields["chat_template_kwargs"].bad(f"may not set {taken[0]}")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False, **extra)
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as cause:
        raise BadRequest(f"the chat template refused the messages: {cause}", "messages") from cause


def _messages(fields: RequestField) -> list[JsonObject]:
    """Return the messages with the arguments of tool calls as objects, which templates read, not as JSON text.

    Arguments that are not the text of an object stay the text that the model wrote.
    """
    messages = fields["messages"].value
    if not is_conversation(messages):
        raise fields["messages"].bad("must be a non-empty list of objects with a role")
    try:
        checked = normalize_messages(messages, "messages")
    except UserError as cause:
        raise BadRequest(str(cause), "messages") from cause
    rendered = []
    for message, given in zip(checked, fields["messages"].items(), strict=True):
        calls = []
        for call in given["tool_calls"].items() if "tool_calls" in given else ():
            function = call["function"]
            function["name"].text()
            arguments = function["arguments"].value
            if isinstance(arguments, str):
                with suppress(orjson.JSONDecodeError):
                    value = orjson.loads(arguments)
                    arguments = value if isinstance(value, dict) else arguments
            elif arguments is not None and not isinstance(arguments, dict):
                raise function["arguments"].must_be("JSON text")
            calls.append({**call.object(), "function": {**function.object(), "arguments": arguments}})
        rendered.append({**message, "tool_calls": calls} if "tool_calls" in given else message)
    return rendered


def forced_call(fields: RequestField) -> tuple[bool, str | None]:
    """Return whether the answer must be a tool call, and the tool's name if the request has one."""
    choice, names = fields["tool_choice"], function_names(_tools(fields) or ())
    name = choice.tool_choice(names, "function", nested=True)
    if choice.value in (None, "auto", "none"):
        return False, None
    if not names:
        raise choice.bad("required: the request has no tools")
    return True, None if choice.value == "required" else name


def _tools(fields: RequestField) -> list[JsonMapping] | None:
    """Return the tools for the chat template; None without tools, or if `tool_choice` is none."""
    tools = fields["tools"].items() if "tools" in fields else []
    for tool in tools:
        if tool["type"].value != "function":
            raise tool["type"].must_be('"function"')
        tool["function"]["name"].text()
    return None if fields["tool_choice"].value == "none" else [tool.object() for tool in tools] or None


@dataclass(frozen=True)
class AnswerFormat:
    """The formats in which answers to one chat are parsed; `opening`: a call's beginning at the end of the prompt."""

    formats: Formats
    tools: Sequence[JsonMapping] = ()
    starts_in_reasoning: bool = False
    opening: str = ""

    @property
    def has_marks(self) -> bool:
        return self.formats != Formats()

    def reply(self) -> ChatChoice:
        """Start to parse an answer."""
        if not self.has_marks:
            return ChatChoice(None)
        parser = make_parser(self.formats, tools=self.tools, starts_in_reasoning=self.starts_in_reasoning)
        return ChatChoice(parser, parser.feed(self.opening))


class ChatChoice:
    """One choice of an answer, parsed from its text; without a parser it has the text only."""

    def __init__(self, parser: OutputParser | None, told: Sequence[Event] = ()) -> None:
        self._parser = parser
        self._told = list(told)
        self._is_new = True
        self.calls = 0

    def message(self, text: str) -> JsonObject:
        """Return the message of a whole answer."""
        output = gathered(self._events(text, ends=True))
        message: JsonObject = {"role": "assistant", "content": output.text}
        if output.reasoning is not None:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["content"] = output.text or None
            message["tool_calls"] = [
                {"index": place, **call_json(call.id, call.name, call.arguments)}
                for place, call in enumerate(output.calls)
            ]
        return message

    def delta(self, text: str, *, ends: bool) -> JsonObject:
        """Return the part of the message that this new text adds."""
        events = self._events(text, ends=ends)
        content = "".join(event.text for event in events if isinstance(event, Text))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: dict[int, JsonObject] = {}
        for event in events:
            if isinstance(event, CallBegun):
                calls[event.index] = {"index": event.index, **call_json(event.id, event.name, "")}
            elif isinstance(event, CallArguments):
                call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        delta: JsonObject = {"role": "assistant"} if self._is_new else {}
        self._is_new = False
        delta["content"] = content if content or not (reasoning or calls) else None
        if reasoning:
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _events(self, text: str, *, ends: bool) -> list[Event]:
        if self._parser is None:
            return [Text(text)]
        events = [*self._told, *self._parser.feed(text), *(self._parser.end() if ends else ())]
        self._told.clear()
        self.calls += sum(isinstance(event, CallEnded) for event in events)
        return events


class OpenAIRoutes:
    """The handlers of OpenAI's routes."""

    def __init__(self, engine: EngineBridge) -> None:
        self._engine = engine

    @property
    def _model(self) -> str:
        return self._engine.core.options.served_model_name

    async def models(self, request: web.Request) -> web.Response:
        length = self._engine.loaded.context_len
        card = {"id": self._model, "object": "model", "owned_by": "slime", "max_model_len": length}
        return json_answer({"object": "list", "data": [card]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        ids, reading = await asyncio.to_thread(self._chat, body)  # long chats take long to render and encode
        return await self._complete(request, body, {"input_ids": ids}, reading)

    def _chat(self, body: RequestField) -> tuple[list[int], AnswerFormat]:
        """Return the token ids of a chat's prompt, and how its answers are parsed.

        Calls are parsed in chats with tools, reasoning with `separate_reasoning`.
        """
        facts = self._engine.loaded
        prompt = render_chat(facts.tokenizer if facts.chat_tokenizer is None else facts.chat_tokenizer(), body)
        tools, formats = _tools(body) or [], self._engine.core.options.formats
        formats = replace(
            formats,
            tool=formats.tool if tools else None,
            reasoning=formats.reasoning if body["separate_reasoning"].flag(True) else None,
        )
        opening, begun = "", opens_reasoning(formats, prompt)
        is_forced, name = forced_call(body)
        if is_forced and formats.tool is None:
            raise body["tool_choice"].bad("must be auto or none in an engine without --tool-call-parser")
        if is_forced:
            opening = call_opening(formats, name, starts_in_reasoning=begun)
        return facts.encode(prompt + opening, special=False), AnswerFormat(formats, tools, begun, opening)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        prompt = body["prompt"].value
        items = prompt if isinstance(prompt, list) else [prompt]
        if all(isinstance(item, str) for item in items):
            return await self._complete(request, body, {"text": prompt})
        if not isinstance(prompt, list):
            raise body["prompt"].bad(f"must be a string, token ids, or a list of them, not {shown(prompt)}")
        return await self._complete(request, body, {"input_ids": prompt})

    def _parse(self, body: RequestField, prompt: JsonObject, reading: AnswerFormat | None) -> list[GenerateRequest]:
        """Convert a body to requests; refuses unknown fields that would change tokens, and notes the others."""
        given = body.object()
        for name in sorted(given.keys() - _KNOWN_FIELDS):
            has_effect = not is_neutral(given[name]) and given[name] != _NEUTRAL.get(name)
            if name in _CHANGES_TOKENS and has_effect:
                raise BadRequest(f"{name} is not supported by the embedded engine", name)
            self._engine.loaded.left_out.note(name)
        params = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        for name, here in (("seed", "sampling_seed"), ("min_tokens", "min_new_tokens")):
            if given.get(name) is not None:
                params[here] = given[name]
        room = self._engine.loaded.context_len
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        params["max_new_tokens"] = body[limit].integer(room, low=0, high=_MOST_TOKENS)
        if reading is not None and reading.has_marks:
            params.setdefault("skip_special_tokens", False)  # the marks may be special tokens
        if reading is not None:
            wants, top = body["logprobs"].flag(), body["top_logprobs"].integer(0, low=0, high=128)
        else:
            wants, top = "logprobs" in body, body["logprobs"].integer(0, low=0, high=128)
        request = {**prompt, "sampling_params": params, "rid": given.get("rid"), "stream": given.get("stream"),
                   "return_logprob": wants, "top_logprobs_num": top}  # fmt: skip
        return parse_generate(request, self._engine.loaded)[0]

    async def _complete(
        self, http: web.Request, body: RequestField, prompt: JsonObject, reading: AnswerFormat | None = None
    ) -> web.StreamResponse:
        """Complete a prompt; the answer is a message if there is a `reading`."""
        requests = self._parse(body, prompt, reading)
        chat = reading is not None
        kind = "chat.completion" if chat else "text_completion"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}" if chat else f"cmpl-{uuid.uuid4().hex}",
                "created": int(time.time()), "model": self._model}  # fmt: skip
        with self._engine.admitted(requests):
            if requests[0].stream:
                return await self._stream(http, body, requests, head, reading)
            done = await self._engine.run(requests)
        sequences = [each.sequence for each in done]
        usage = _count_usage(sequences)
        rest = {"usage": usage, "metadata": {"weight_version": self._engine.core.weight_version}}

        def make(texts: list[str]) -> web.Response:
            choices: list[JsonObject] = []
            for at, (each, text) in enumerate(zip(done, texts, strict=True)):
                piece = whole(each.sequence, text)
                reply = ChatChoice(None) if reading is None else reading.reply()
                content: JsonObject = {"text": text} if reading is None else {"message": reply.message(text)}
                logprobs = self._logprobs(piece, each.request, is_chat=chat)
                choices.append(
                    {**content, "finish_reason": _openai_finish_reason(piece, reply), "logprobs": logprobs, "index": at}
                )
            return json_answer({**head, "object": kind, "choices": choices, **rest})

        return await self._engine.writer.make(sequences, make)

    def _logprobs(
        self, piece: OutputPiece, request: GenerateRequest, *, is_chat: bool, offset: int = 0
    ) -> JsonObject | None:
        """Return a piece's log-probs in the form of chats or of completions, whose text it continues at `offset`.

        Completions name the likeliest of several tokens with one text, and always the sampled token.
        """
        if not request.return_logprob:
            return None
        tops = piece.top or [[] for _ in piece.ids]
        named = list({*piece.ids, *(i for best in tops for _, i in best)})
        texts = self._engine.loaded.tokenizer.batch_decode([[i] for i in named]) if named else []
        words = dict(zip(named, texts, strict=True))
        if is_chat:
            return {
                "content": [
                    {"token": words[t], "logprob": lp,
                     "top_logprobs": [{"token": words[i], "logprob": p} for p, i in best]}
                    for t, lp, best in zip(piece.ids, piece.logprobs, tops, strict=True)
                ]
            }  # fmt: skip
        tokens = [words[token] for token in piece.ids]
        top = None
        if request.top_logprobs:
            top = [
                {words[i]: p for p, i in reversed(best)} | {words[token]: logprob}
                for token, logprob, best in zip(piece.ids, piece.logprobs, tops, strict=True)
            ]
        offsets = [offset + before for before in itertools.accumulate(map(len, tokens), initial=0)][: len(tokens)]
        return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": top, "text_offset": offsets}

    async def _stream(
        self,
        http: web.Request,
        body: RequestField,
        requests: list[GenerateRequest],
        head: JsonObject,
        reading: AnswerFormat | None,
    ) -> web.StreamResponse:
        if len(requests) > 1 or requests[0].params.n > 1:
            raise BadRequest("stream takes one prompt and n = 1", "stream")
        [request] = requests
        with_usage = bool(body["stream_options"].value) and body["stream_options"]["include_usage"].flag()
        kind = "text_completion" if reading is None else "chat.completion.chunk"
        reply, offset = ChatChoice(None) if reading is None else reading.reply(), 0
        async with event_stream(http) as response:
            async for seq, piece in self._engine.pieces(request):
                content: JsonObject = {"text": piece.text}
                if reading is not None:
                    content = {"delta": reply.delta(piece.text, ends=piece.finish is not None)}
                logprobs = self._logprobs(piece, request, is_chat=reading is not None, offset=offset)
                if logprobs is not None and reading is None:
                    offset += sum(map(len, logprobs["tokens"]))
                ends = {"finish_reason": _openai_finish_reason(piece, reply), "logprobs": logprobs}
                await send_event(response, {**head, "object": kind, "choices": [{"index": 0, **content, **ends}]})
                if piece.finish is not None and with_usage:
                    await send_event(response, {**head, "object": kind, "choices": [], "usage": _count_usage([seq])})
        return response


def _openai_finish_reason(piece: OutputPiece, reply: ChatChoice) -> str | None:
    if piece.finish is None:
        return None
    kind = str(piece.finish["type"])
    return "tool_calls" if reply.calls and kind == "stop" else kind


def _count_usage(sequences: Sequence[EngineSequence]) -> JsonObject:
    """Count the tokens of an answer; each prompt counts once, for any number of samples."""
    first = [seq for seq in sequences if seq.choice == 0]
    return usage_json(
        prompt=sum(len(seq.prompt_ids) for seq in first),
        cached=sum(seq.cached_tokens for seq in first),
        completion=sum(len(seq.output_ids) for seq in sequences),
    )
