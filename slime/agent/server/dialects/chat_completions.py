"""OpenAI's chat completions, and `/v1/models` in the formats of OpenAI and of Anthropic at once.

Reasoning is `reasoning_content`, in answers and in the messages that clients send back. Consecutive assistant messages
are one turn: some clients send back the text and the calls of a turn as two. Log-probs cover every sampled token, and
come with the last chunk of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects.dialect import (
    Asked,
    Dialect,
    FinishedTurn,
    StreamWriter,
    ascii_json,
    has_visible_text,
    sse_data,
)
from slime.agent.server.dialects.errors import Kind, Problem, openai_error
from slime.agent.server.dialects.request_fields import (
    BodyField,
    add_message,
    choice_notes,
    replace_surrogates,
)
from slime.models.openai_api import call_json, function_names, usage_json
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
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_COUNTS = {"top_k": ("top_k", -1), "seed": ("sampling_seed", -(2**63)), "min_tokens": ("min_new_tokens", 0)}
_GOES_ON = '"logprobs":null,"finish_reason":null}'


class ChatWriter(StreamWriter):
    """Streams chunks of one choice, then its usage if requested, then `[DONE]`."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        super().__init__(asked, turn_ref)
        self._head = _head(asked, turn_ref, "chat.completion.chunk")
        self._opening = f'data: {ascii_json(self._head)[:-1]},"choices":[{{"index":0,"delta":'
        self._ending = ',"usage":null}\n\n' if asked.include_usage else "}\n\n"

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def encode(self, shown: Event) -> bytes:
        match shown:
            case Text():
                return self._chunk_of(f'{{"content":{encode_basestring_ascii(shown.text)}}}')
            case Reasoning():
                return self._chunk_of(f'{{"reasoning_content":{encode_basestring_ascii(shown.text)}}}')
            case CallBegun():
                return self._chunk({"tool_calls": [{"index": shown.index, **call_json(shown.id, shown.name, "")}]})
            case CallArguments():
                piece = {"index": shown.index, "function": {"arguments": shown.text}}
                return self._chunk({"tool_calls": [piece]})
        raise AssertionError(shown)

    def end(self, finished: FinishedTurn) -> bytes:
        ends = {"logprobs": _log_probs(finished), "finish_reason": finish_reason(finished)}
        last = self._chunk_of("{}", ascii_json(ends)[1:])
        if self._asked.include_usage:
            last += sse_data({**self._head, "choices": [], "usage": _usage(finished)})
        return last + b"data: [DONE]\n\n"

    def problem(self, problem: Problem) -> bytes:
        return sse_data(openai_error(problem)) + b"data: [DONE]\n\n"

    def _chunk(self, delta: JsonMapping) -> bytes:
        return self._chunk_of(ascii_json(delta))

    def _chunk_of(self, delta: str, ends: str = _GOES_ON) -> bytes:
        """A chunk of the JSON text of a delta; each token of an answer is one, so the rest of it is encoded once."""
        return f"{self._opening}{delta},{ends}]{self._ending}".encode()


class ChatCompletions(Dialect):
    name = "chat"
    paths = ("/v1/chat/completions",)
    writer = ChatWriter
    statuses = (
        dict.fromkeys((Kind.CLOSED, Kind.TURN_LIMIT, Kind.TOKEN_LIMIT, Kind.DEADLINE, Kind.REFUSED), 404)
        | dict.fromkeys((Kind.UNKNOWN_MODEL, Kind.SHUTTING_DOWN), 404)
        | {Kind.NO_SESSION: 401, **Dialect.statuses}
    )

    def asked(self, path: str, body: object) -> Asked:
        fields = BodyField(body)
        fields.object()
        _check_chat_features(fields)
        fields.refuse_unknown_fields(USED, NEUTRAL)
        tools = []
        for tool in fields["tools"].items(optional=True):
            if tool.object().get("type", "function") != "function":
                raise tool["type"].bad("only function tools are offered in chat completions")
            function = tool["function"]
            tools.append(function.function_tool(function["name"].name(), function["parameters"]))
        stream = fields["stream"].flag()
        options = BodyField(fields["stream_options"].object(optional=True), "stream_options")
        longest = fields["max_completion_tokens"].whole(1)
        tool_choice = fields["tool_choice"].tool_choice(function_names(tools), "function", nested=True)
        messages: list[Message] = []
        for entry in fields["messages"].items():
            add_message(messages, _message(entry))
        if not messages:
            raise fields["messages"].bad("must have at least one message")
        parallel = fields["parallel_tool_calls"].flag(True)
        longest = fields["max_tokens"].whole(1) if longest is None else longest
        params = fields.sampling_params(_NUMBERS, _COUNTS)
        if "stop" in fields and (stop := fields["stop"].text_or_texts()):
            params["stop"] = stop
        if fields["stop_token_ids"].value:
            ids = [entry.value for entry in fields["stop_token_ids"].items()]
            if not all(isinstance(token, int) for token in ids):
                raise fields["stop_token_ids"].bad("must be a list of token ids")
            params["stop_token_ids"] = ids
        request = TurnRequest(
            messages=tuple(messages),
            tools=tuple(tools),
            tool_choice=tool_choice,
            parallel_tool_calls=parallel,
            max_tokens=longest,
            params=params,
        )
        return Asked(
            request=request,
            model=fields["model"].name(),
            stream=stream,
            include_usage=not stream or options["include_usage"].flag(),
            want_log_probs=fields["logprobs"].flag(),
            notes=choice_notes(tool_choice),
        )

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        output = finished.output
        message: JsonObject = {"role": "assistant", "content": None, "refusal": None}
        if has_visible_text(output.reasoning):
            message["reasoning_content"] = output.reasoning
        if has_visible_text(output.text):
            message["content"] = output.text
        elif not output.calls:
            message["content"] = ""
        if output.calls:
            message["tool_calls"] = [call_json(call.id, call.name, call.arguments) for call in output.calls]
        ends = {"logprobs": _log_probs(finished), "finish_reason": finish_reason(finished)}
        return {
            **_head(asked, finished.reference, "chat.completion"),
            "choices": [{"index": 0, "message": message, **ends}],
            "usage": _usage(finished),
        }

    def counted(self, tokens: int) -> JsonObject:
        return {"prompt_tokens": tokens}


def finish_reason(finished: FinishedTurn) -> str:
    return "length" if finished.is_cut else "tool_calls" if finished.output.calls else "stop"


def _usage(finished: FinishedTurn) -> JsonObject:
    usage = finished.usage
    return usage_json(usage.prompt, usage.cached, usage.completion, usage.reasoning)


def _check_chat_features(fields: BodyField) -> None:
    """Refuse requests whose answer is not one text with calls."""
    if fields["n"].whole(0) not in (None, 1):
        raise fields["n"].bad("only one choice a request is sampled here: ask again for another one")
    if fields["top_logprobs"].whole(0):
        raise fields["top_logprobs"].bad(
            "only the log-probs of the tokens that were sampled are known: leave it out or set 0"
        )
    if fields["modalities"].value not in (None, [], ["text"]) or fields["audio"].value:
        raise fields["modalities"].bad("only text is sampled here")
    for name in ("functions", "function_call"):
        if fields[name].value:
            raise fields[name].bad("was replaced by tools and tool_choice: use these")
    if fields["logit_bias"].value:
        raise fields["logit_bias"].bad(
            "the distribution that is trained on must be the one that is sampled from: leave it out"
        )
    check_response_format(fields["response_format"])


def check_response_format(given: BodyField) -> None:
    """Refuse a forced answer format: its tokens would come from a distribution other than the trained one."""
    if given.value is not None and (kind := given.object().get("type", "text")) != "text":
        shown = replace_surrogates(str(kind))
        raise given.bad(f"answers are sampled freely here, {shown!r} is not offered: leave it out")


def _message(entry: BodyField) -> Message:
    role = entry["role"].value
    if role in ("system", "developer", "user"):
        content = entry["content"].content(PARTS)
        return Message("user" if role == "user" else "system", content, name=entry["name"].optional_text())
    if role == "tool":
        return Message(
            "tool",
            entry["content"].result(PARTS),
            tool_call_id=entry["tool_call_id"].text(),
            name=entry["name"].optional_text(),
        )
    if role != "assistant":
        raise entry["role"].bad("must be system, developer, user, assistant or tool")
    reasoning = entry["reasoning_content"].optional_text()
    if reasoning is None:
        reasoning = entry["reasoning"].optional_text()
    given = entry["tool_calls"].items(optional=True)
    content = entry["content"].content(PARTS, between="")
    calls = []
    for call in given:
        function = call["function"]
        function.object()
        calls.append(ToolCall(call["id"].text(), function["name"].text(), function["arguments"].json_text()))
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls))


def _head(asked: Asked, reference: str, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{reference}", "object": kind, "created": int(time.time()), "model": asked.model}


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
