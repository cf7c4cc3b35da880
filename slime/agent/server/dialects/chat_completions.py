"""OpenAI's chat completions, and `/v1/models` in the formats of OpenAI and of Anthropic at once.

Reasoning is `reasoning_content`, in answers and in the messages that clients send back. Consecutive assistant messages
are one turn: some clients send back the text and the calls of a turn as two. Log-probs cover every sampled token, and
come with the last chunk of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects import request_fields, sse
from slime.agent.server.dialects.dialect import Asked, FinishedTurn, Problem, Usage
from slime.agent.server.dialects.errors import ErrorResponse, chat_problem, openai_error
from slime.agent.server.dialects.request_fields import bad_field
from slime.models.parsers.events import CallArguments, CallBegun, Event, Reasoning, Text
from slime.storage.json_types import JsonMapping, JsonObject

USED = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "stop"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"}
    | {"frequency_penalty", "repetition_penalty", "seed", "stop_token_ids", "min_tokens", "logprobs"}
    # refused with their own messages, unless they have no effect
    | {"n", "top_logprobs", "modalities", "audio", "functions", "function_call", "logit_bias", "response_format"}
)
# Accepted and ignored: the identity of the client, billing and storage, hints about effort, and settings that the
# trainer decides (the template's arguments, thinking).
NEUTRAL = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "verbosity", "moderation"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt", "rid", "priority"}
    | {"reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget", "chat_template_kwargs"}
    | {"include_reasoning", "separate_reasoning", "stream_reasoning", "usage", "provider", "skip_special_tokens"}
    | {"no_stop_trim", "spaces_between_special_tokens", "continue_final_message", "add_generation_prompt"}
    | {"vl_high_resolution_images", "provider_specific_fields", "session_id", "preserve_thinking"}
)
PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_COUNTS = {"top_k": ("top_k", -1), "seed": ("sampling_seed", -(2**63)), "min_tokens": ("min_new_tokens", 0)}


class ChatCompletions:
    name = "chat"
    paths: tuple[str, ...] = ("/v1/chat/completions",)

    def key(self, headers: Mapping[str, str]) -> str | None:
        return request_fields.session_key(headers)

    def asked(self, path: str, body: object, headers: Mapping[str, str]) -> Asked:
        fields = request_fields.require_object(body, "the body")
        _check_chat_features(fields)
        request_fields.refuse_unknown_fields(fields, USED, NEUTRAL)
        tools = _tools(fields.get("tools"))
        stream = request_fields.flag_field(fields, "stream", False)
        options = request_fields.require_object(fields.get("stream_options") or {}, "stream_options")
        longest = request_fields.int_field(fields, "max_completion_tokens", 1)
        choice: object = fields.get("tool_choice")
        if choice is None:
            tool_choice = "auto"
        elif isinstance(choice, str):
            if choice not in ("auto", "none", "required"):
                raise bad_field("tool_choice", 'must be "auto", "none", "required" or a function')
            tool_choice = choice
        else:
            named = request_fields.require_object(choice, "tool_choice")
            if named.get("type") != "function":
                raise bad_field("tool_choice.type", 'must be "function"')
            function = request_fields.require_object(named.get("function"), "tool_choice.function")
            tool_choice = request_fields.named_tool_choice(function.get("name"), tools)
        request = TurnRequest(
            messages=conversation(fields.get("messages")),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=request_fields.flag_field(fields, "parallel_tool_calls", True),
            max_tokens=longest if longest is not None else request_fields.int_field(fields, "max_tokens", 1),
            params=sampling_params(fields),
        )
        return Asked(
            request=request,
            model=request_fields.require_name(fields.get("model"), "model"),
            stream=stream,
            include_usage=not stream or request_fields.flag_field(options, "include_usage", False),
            want_log_probs=request_fields.flag_field(fields, "logprobs", False),
            notes=request_fields.choice_notes(tool_choice),
        )

    def writer(self, asked: Asked, turn_ref: str) -> ChatWriter:
        return ChatWriter(asked, turn_ref)

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        output = finished.output
        message: JsonObject = {"role": "assistant", "content": None, "refusal": None}
        if sse.has_visible_text(output.reasoning):
            message["reasoning_content"] = output.reasoning
        if sse.has_visible_text(output.text):
            message["content"] = output.text
        elif not output.calls:
            message["content"] = ""
        if output.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in output.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _log_probs(finished),
            "finish_reason": finish_reason(finished),
        }
        return {
            **_head(asked, finished.reference, "chat.completion"),
            "choices": [choice],
            "usage": usage_body(finished.usage),
        }

    def counted(self, tokens: int) -> JsonObject:
        return {"prompt_tokens": tokens}

    def problem(self, problem: Problem) -> ErrorResponse:
        return chat_problem(problem)


class ChatWriter:
    """Streams chunks of one choice, then its usage if requested, then `[DONE]`."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        self._usage = asked.include_usage
        self._head = _head(asked, turn_ref, "chat.completion.chunk")
        self._shown = sse.VisibleEvents()

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> bytes:
        chunks = b""
        for shown in self._shown.of(event):
            match shown:
                case Reasoning():
                    chunks += self._chunk({"reasoning_content": shown.text})
                case Text():
                    chunks += self._chunk({"content": shown.text})
                case CallBegun():
                    call = {"index": shown.index, **_call(shown.id, shown.name, "")}
                    chunks += self._chunk({"tool_calls": [call]})
                case CallArguments():
                    piece = {"index": shown.index, "function": {"arguments": shown.text}}
                    chunks += self._chunk({"tool_calls": [piece]})
                case _:
                    raise AssertionError(shown)
        return chunks

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE_COMMENT

    def end(self, finished: FinishedTurn) -> bytes:
        last = self._chunk({}, finish=finish_reason(finished), log_probs=_log_probs(finished))
        if self._usage:
            last += sse.data({**self._head, "choices": [], "usage": usage_body(finished.usage)})
        return last + b"data: [DONE]\n\n"

    def problem(self, problem: Problem) -> bytes:
        return sse.data({"error": openai_error(problem)}) + b"data: [DONE]\n\n"

    def _chunk(self, delta: JsonMapping, finish: str | None = None, log_probs: JsonMapping | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        return sse.data({**chunk, "usage": None} if self._usage else chunk)


def finish_reason(finished: FinishedTurn) -> str:
    """The finish reason; `length` for a turn that was cut off, even inside a call."""
    if finished.finish_reason in ("length", "abort"):
        return "length"
    return "tool_calls" if finished.output.calls else "stop"


def usage_body(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def conversation(value: object) -> tuple[Message, ...]:
    """The messages; consecutive assistant messages are merged."""
    messages: list[Message] = []
    for i, entry in enumerate(request_fields.require_list(value, "messages")):
        request_fields.add_message(
            messages, _message(request_fields.require_object(entry, f"messages[{i}]"), f"messages[{i}]")
        )
    if not messages:
        raise bad_field("messages", "must have at least one message")
    return tuple(messages)


def sampling_params(fields: JsonMapping) -> JsonObject:
    """The sampling parameters that the client has set, by SGLang's names."""
    params: JsonObject = {}
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (number := request_fields.number_field(fields, name)) is not None:
            params[name] = number
    for name, (ours, least) in _COUNTS.items():
        if (count := request_fields.int_field(fields, name, least)) is not None:
            params[ours] = count
    if fields.get("stop") is not None and (stop := request_fields.texts(fields["stop"], "stop")):
        params["stop"] = stop
    if ids := fields.get("stop_token_ids"):
        if not all(isinstance(token, int) for token in request_fields.require_list(ids, "stop_token_ids")):
            raise bad_field("stop_token_ids", "must be a list of token ids")
        params["stop_token_ids"] = list(ids)
    return params


def _check_chat_features(fields: JsonMapping) -> None:
    """Refuse requests whose answer is not one text with calls."""
    if request_fields.int_field(fields, "n", 0) not in (None, 1):
        raise bad_field("n", "only one choice a request is sampled here: ask again for another one")
    if request_fields.int_field(fields, "top_logprobs", 0):
        raise bad_field(
            "top_logprobs", "only the log-probs of the tokens that were sampled are known: leave it out or set 0"
        )
    text_only = fields.get("modalities") in (None, [], ["text"])
    if not text_only or fields.get("audio"):
        raise bad_field("modalities", "only text is sampled here")
    for name in ("functions", "function_call"):
        if fields.get(name):
            raise bad_field(name, "was replaced by tools and tool_choice: use these")
    if fields.get("logit_bias"):
        raise bad_field(
            "logit_bias", "the distribution that is trained on must be the one that is sampled from: leave it out"
        )
    check_response_format(fields.get("response_format"), "response_format")


def check_response_format(value: object, where: str) -> None:
    """Refuse a forced answer format: its tokens would come from a distribution other than the trained one."""
    if value is None:
        return
    kind = request_fields.require_object(value, where).get("type", "text")
    if kind != "text":
        raise bad_field(
            where,
            f"answers are sampled freely here, {request_fields.replace_surrogates(str(kind))!r} is not offered: leave "
            "it out",
        )


def _tools(value: object) -> tuple[JsonMapping, ...]:
    tools = []
    for i, entry in enumerate(request_fields.require_list(value or [], "tools")):
        where = f"tools[{i}]"
        tool = request_fields.require_object(entry, where)
        if tool.get("type", "function") != "function":
            raise bad_field(f"{where}.type", "only function tools are offered in chat completions")
        function = request_fields.require_object(tool.get("function"), f"{where}.function")
        tools.append(
            request_fields.function_tool(
                function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
            )
        )
    return tuple(tools)


def _message(entry: JsonMapping, where: str) -> Message:
    role = entry.get("role")
    if role in ("system", "developer", "user"):
        content = request_fields.content_text(entry.get("content"), f"{where}.content", PARTS)
        name = request_fields.text_field(entry, "name", where)
        return Message("user" if role == "user" else "system", content, name=name)
    if role == "tool":
        return Message(
            "tool",
            request_fields.result_text(entry.get("content"), f"{where}.content", PARTS),
            tool_call_id=request_fields.require_text(entry.get("tool_call_id"), f"{where}.tool_call_id"),
            name=request_fields.text_field(entry, "name", where),
        )
    if role != "assistant":
        raise bad_field(f"{where}.role", "must be system, developer, user, assistant or tool")
    reasoning = request_fields.text_field(entry, "reasoning_content", where)
    if reasoning is None:
        reasoning = request_fields.text_field(entry, "reasoning", where)
    entries = request_fields.require_list(entry.get("tool_calls") or [], f"{where}.tool_calls")
    content = request_fields.content_text(entry.get("content"), f"{where}.content", PARTS, between="")
    calls = []
    for i, value in enumerate(entries):
        place = f"{where}.tool_calls[{i}]"
        call = request_fields.require_object(value, place)
        function = request_fields.require_object(call.get("function"), f"{place}.function")
        call_id = request_fields.require_text(call.get("id"), f"{place}.id")
        name = request_fields.require_text(function.get("name"), f"{place}.function.name")
        arguments = request_fields.as_json_text(function.get("arguments"), f"{place}.function.arguments")
        calls.append(ToolCall(call_id, name, arguments))
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls))


def _head(asked: Asked, reference: str, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{reference}", "object": kind, "created": int(time.time()), "model": asked.model}


def _call(id_: str, name: str, arguments: str) -> JsonObject:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _log_probs(finished: FinishedTurn) -> JsonObject | None:
    if finished.log_probs is None:
        return None
    content = [
        {"token": entry.token, "bytes": list(entry.raw), "logprob": entry.log_prob, "top_logprobs": []}
        for entry in finished.log_probs
    ]
    return {"content": content, "refusal": None}


_MODEL_CREATED = 1_700_000_000


def model_body(name: str) -> JsonObject:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": _MODEL_CREATED,
        "created_at": "2023-11-14T22:13:20Z",
        "owned_by": "slime",
        "display_name": name,
    }


def models_body(names: Iterable[str]) -> JsonObject:
    models = [model_body(name) for name in names]
    ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"object": "list", "data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
