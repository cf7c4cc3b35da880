"""OpenAI's chat completions.

Reasoning is `reasoning_content`, in answers and in the messages that come back. Consecutive assistant messages are one
turn: some clients send text and calls of a turn back as two. Log-probs are those of every sampled token, and come with
the last piece of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects import request_fields, sse
from slime.agent.server.dialects.dialect import Asked, Finished, Problem, TokenLogProb, Usage
from slime.agent.server.dialects.errors import Answer, chat_problem, openai_error
from slime.agent.server.dialects.request_fields import bad
from slime.models.parsers.events import CallArguments, CallBegun, Event, Reasoning, Text

USED = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "stop"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"}
    | {"frequency_penalty", "repetition_penalty", "seed", "stop_token_ids", "min_tokens", "logprobs"}
    # refused with a sentence of their own, where they ask for anything
    | {"n", "top_logprobs", "modalities", "audio", "functions", "function_call", "logit_bias", "response_format"}
)
# Accepted and of no effect: who asks and how it is billed or stored, and hints about effort. What the trainer decides
# (the template's arguments, whether the model thinks) the client cannot change, and need not know.
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
        fields = request_fields.a_mapping(body, "the body")
        _refuse_other_answers(fields)
        request_fields.known_only(fields, USED, NEUTRAL)
        tools = _tools(fields.get("tools"))
        stream = request_fields.a_flag(fields, "stream", False)
        options = request_fields.a_mapping(fields.get("stream_options") or {}, "stream_options")
        longest = request_fields.an_int(fields, "max_completion_tokens", 1)
        choice = _tool_choice(fields.get("tool_choice"), tools)
        request = TurnRequest(
            messages=conversation(fields.get("messages")),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=request_fields.a_flag(fields, "parallel_tool_calls", True),
            max_tokens=longest if longest is not None else request_fields.an_int(fields, "max_tokens", 1),
            params=sampling_params(fields),
        )
        return Asked(
            request=request,
            model=request_fields.a_name(fields.get("model"), "model"),
            stream=stream,
            include_usage=not stream or request_fields.a_flag(options, "include_usage", False),
            want_log_probs=request_fields.a_flag(fields, "logprobs", False),
            notes=request_fields.choice_notes(choice),
        )

    def writer(self, asked: Asked, turn_ref: str) -> ChatWriter:
        return ChatWriter(asked, turn_ref)

    def whole(self, asked: Asked, finished: Finished) -> dict[str, Any]:
        output = finished.output
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if sse.worth_showing(output.reasoning):
            message["reasoning_content"] = output.reasoning
        if sse.worth_showing(output.text):
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

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"prompt_tokens": tokens}

    def problem(self, problem: Problem) -> Answer:
        return chat_problem(problem)


class ChatWriter:
    """Chunks of one choice, then its usage if asked for, then `[DONE]`."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        self._usage = asked.include_usage
        self._head = _head(asked, turn_ref, "chat.completion.chunk")
        self._shown = sse.Shown()

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> bytes:
        return b"".join(self._chunk(self._delta(shown)) for shown in self._shown.of(event))

    def keep_alive(self) -> bytes:
        return sse.COMMENT

    def end(self, finished: Finished) -> bytes:
        last = self._chunk({}, finish=finish_reason(finished), log_probs=_log_probs(finished))
        if self._usage:
            last += sse.data({**self._head, "choices": [], "usage": usage_body(finished.usage)})
        return last + b"data: [DONE]\n\n"

    def problem(self, problem: Problem) -> bytes:
        return sse.data({"error": openai_error(problem)}) + b"data: [DONE]\n\n"

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Reasoning():
                return {"reasoning_content": event.text}
            case Text():
                return {"content": event.text}
            case CallBegun():
                return {"tool_calls": [{"index": event.index, **_call(event.id, event.name, "")}]}
            case CallArguments():
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        raise AssertionError(event)

    def _chunk(
        self, delta: Mapping[str, Any], finish: str | None = None, log_probs: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        chunk = {**self._head, "choices": [choice]}
        return sse.data({**chunk, "usage": None} if self._usage else chunk)


def finish_reason(finished: Finished) -> str:
    """A turn that was cut off is `length`, also where it had begun a call."""
    if finished.finish_reason in ("length", "abort"):
        return "length"
    return "tool_calls" if finished.output.calls else "stop"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def conversation(value: object) -> tuple[Message, ...]:
    """The messages, consecutive ones of the assistant as one."""
    messages: list[Message] = []
    for i, entry in enumerate(request_fields.a_list(value, "messages")):
        request_fields.add_message(
            messages, _message(request_fields.a_mapping(entry, f"messages[{i}]"), f"messages[{i}]")
        )
    if not messages:
        raise bad("messages", "must have at least one message")
    return tuple(messages)


def sampling_params(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The client's sampling parameters by SGLang's names; those it left out are left out."""
    params: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (number := request_fields.a_number(fields, name)) is not None:
            params[name] = number
    for name, (ours, least) in _COUNTS.items():
        if (count := request_fields.an_int(fields, name, least)) is not None:
            params[ours] = count
    if fields.get("stop") is not None and (stop := request_fields.texts(fields["stop"], "stop")):
        params["stop"] = stop
    if ids := fields.get("stop_token_ids"):
        if not all(isinstance(token, int) for token in request_fields.a_list(ids, "stop_token_ids")):
            raise bad("stop_token_ids", "must be a list of token ids")
        params["stop_token_ids"] = list(ids)
    return params


def _refuse_other_answers(fields: Mapping[str, Any]) -> None:
    """What would need another answer than one text with calls."""
    if request_fields.an_int(fields, "n", 0) not in (None, 1):
        raise bad("n", "only one choice a request is sampled here: ask again for another one")
    if request_fields.an_int(fields, "top_logprobs", 0):
        raise bad("top_logprobs", "only the log-probs of the tokens that were sampled are known: leave it out or set 0")
    text_only = fields.get("modalities") in (None, [], ["text"])
    if not text_only or fields.get("audio"):
        raise bad("modalities", "only text is sampled here")
    for name in ("functions", "function_call"):
        if fields.get(name):
            raise bad(name, "was replaced by tools and tool_choice: use these")
    if fields.get("logit_bias"):
        raise bad(
            "logit_bias", "the distribution that is trained on must be the one that is sampled from: leave it out"
        )
    refuse_formats(fields.get("response_format"), "response_format")


def refuse_formats(value: object, where: str) -> None:
    """Answers of a forced form are sampled from another distribution than the one that is trained."""
    if value is None:
        return
    kind = request_fields.a_mapping(value, where).get("type", "text")
    if kind != "text":
        raise bad(
            where, f"answers are sampled freely here, {request_fields.clean(str(kind))!r} is not offered: leave it out"
        )


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    tools = []
    for i, entry in enumerate(request_fields.a_list(value or [], "tools")):
        where = f"tools[{i}]"
        tool = request_fields.a_mapping(entry, where)
        if tool.get("type", "function") != "function":
            raise bad(f"{where}.type", "only function tools are offered in chat completions")
        function = request_fields.a_mapping(tool.get("function"), f"{where}.function")
        tools.append(
            request_fields.function_tool(
                function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
            )
        )
    return tuple(tools)


def _tool_choice(value: object, tools: tuple[Mapping[str, Any], ...]) -> str:
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise bad("tool_choice", 'must be "auto", "none", "required" or a function')
        return value
    choice = request_fields.a_mapping(value, "tool_choice")
    if choice.get("type") != "function":
        raise bad("tool_choice.type", 'must be "function"')
    return request_fields.chosen(
        request_fields.a_mapping(choice.get("function"), "tool_choice.function").get("name"), tools
    )


def _message(entry: Mapping[str, Any], where: str) -> Message:
    role = entry.get("role")
    if role in ("system", "developer", "user"):
        content = request_fields.content_text(entry.get("content"), f"{where}.content", PARTS)
        name = request_fields.text_or_none(entry, "name", where)
        return Message("user" if role == "user" else "system", content, name=name)
    if role == "tool":
        return Message(
            "tool",
            request_fields.result_text(entry.get("content"), f"{where}.content", PARTS),
            tool_call_id=request_fields.a_text(entry.get("tool_call_id"), f"{where}.tool_call_id"),
            name=request_fields.text_or_none(entry, "name", where),
        )
    if role != "assistant":
        raise bad(f"{where}.role", "must be system, developer, user, assistant or tool")
    reasoning = request_fields.text_or_none(entry, "reasoning_content", where)
    if reasoning is None:
        reasoning = request_fields.text_or_none(entry, "reasoning", where)
    calls = enumerate(request_fields.a_list(entry.get("tool_calls") or [], f"{where}.tool_calls"))
    return Message(
        "assistant",
        request_fields.content_text(entry.get("content"), f"{where}.content", PARTS, between=""),
        reasoning=reasoning,
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in calls),
    )


def _tool_call(value: object, where: str) -> ToolCall:
    call = request_fields.a_mapping(value, where)
    function = request_fields.a_mapping(call.get("function"), f"{where}.function")
    return ToolCall(
        request_fields.a_text(call.get("id"), f"{where}.id"),
        request_fields.a_text(function.get("name"), f"{where}.function.name"),
        request_fields.as_json_text(function.get("arguments"), f"{where}.function.arguments"),
    )


def _head(asked: Asked, reference: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reference}", "object": kind, "created": int(time.time()), "model": asked.model}


def _call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _log_probs(finished: Finished) -> dict[str, Any] | None:
    if finished.log_probs is None:
        return None
    return {"content": [_log_prob(entry) for entry in finished.log_probs], "refusal": None}


def _log_prob(entry: TokenLogProb) -> dict[str, Any]:
    return {"token": entry.token, "bytes": list(entry.raw), "logprob": entry.log_prob, "top_logprobs": []}


# `/v1/models`, in the words of OpenAI and of Anthropic at once.

_BORN = 1_700_000_000


def model_body(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": _BORN,
        "created_at": "2023-11-14T22:13:20Z",
        "owned_by": "slime",
        "display_name": name,
    }


def models_body(names: Iterable[str]) -> dict[str, Any]:
    models = [model_body(name) for name in names]
    ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"object": "list", "data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
