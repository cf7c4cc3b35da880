"""From OpenAI's `messages`, `tools` and `chat_template_kwargs` to the text of a prompt.

Invariant: the text is what the model's own chat template makes of them. A request chooses what the template reads,
never the template itself nor how it is applied.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import orjson
from jinja2.exceptions import TemplateError

from slime.data.chat_template import checked_messages, is_conversation
from slime.engine.embedded.http.fields import Fields
from slime.engine.embedded.refusals import BadRequest, shown
from slime.errors import UserError


def chat_text(tokenizer: Any, fields: Fields) -> str:
    """The prompt of a chat request, up to where the assistant begins."""
    if tokenizer.chat_template is None:
        raise BadRequest("this model's tokenizer has no chat template: use /v1/completions or /generate")
    if "chat_template" in fields:
        raise BadRequest("chat_template: this engine uses the model's own template", "chat_template")
    messages, tools, extra = _messages(fields), _tools(fields), _template_kwargs(tokenizer, fields)
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False, **extra)
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as cause:
        raise BadRequest(f"the chat template refused the messages: {cause}", "messages") from cause


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.body.get("messages")
    if not isinstance(messages, list) or not is_conversation(messages):
        raise BadRequest("messages must be a non-empty list of objects with a role", "messages")
    try:
        checked = checked_messages(messages, "messages")
    except UserError as cause:
        raise BadRequest(str(cause), "messages") from cause
    return [_with_arguments(message) for message in checked]


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read the arguments of a tool call as an object; OpenAI sends the JSON text of one."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise BadRequest(f"tool_calls must be a list, not {shown(calls)}", "messages")
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"a tool call must have a function with a name, not {shown(call)}", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    elif arguments is not None and not isinstance(arguments, Mapping):
        raise BadRequest(f"the arguments of a tool call must be JSON text, not {shown(arguments)}", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str) -> Any:
    """The object in a call's arguments; what a model wrote wrongly stays the text that it wrote."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text


def forced_call(fields: Fields) -> tuple[bool, str | None]:
    """Whether the answer must be a call, and of which tool if the request names one."""
    choice, tools = fields.body.get("tool_choice"), _tools(fields)
    if choice in (None, "auto", "none"):
        return False, None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and name not in [tool["function"]["name"] for tool in tools or ()]:
        raise BadRequest(
            f"tool_choice must be auto, none, required or one of the tools, not {shown(choice)}", "tool_choice"
        )
    if not tools:
        raise BadRequest("tool_choice required: the request has no tools", "tool_choice")
    return True, name


def _tools(fields: Fields) -> list[Any] | None:
    tools, choice = fields.body.get("tools"), fields.body.get("tool_choice")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BadRequest(f"tools must be a list of functions, not {shown(tools)}", "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, not {shown(tool)}', "tools"
            )
    return None if choice == "none" else tools or None


def _template_kwargs(tokenizer: Any, fields: Fields) -> dict[str, Any]:
    extra = fields.body.get("chat_template_kwargs") or {}
    if not isinstance(extra, Mapping):
        raise BadRequest(f"chat_template_kwargs must be an object, not {shown(extra)}", "chat_template_kwargs")
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    if taken := sorted(reserved & extra.keys()):
        raise BadRequest(f"chat_template_kwargs may not set {taken[0]}", "chat_template_kwargs")
    return dict(extra)
