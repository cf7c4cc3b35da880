"""Byte-level chat template for tests of tokens: ids below 256 are bytes, the others are control tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.agent.messages import Message, ToolCall
from slime.agent.session.session import SampledTurn

BEGIN, END, THINK = 256, 257, 258


class ByteTemplate:
    """Renders each message as `<begin>role\\ncontent<end>`, without the reasoning of earlier turns."""

    refusal: str | None = None
    stop_ids = frozenset({END})

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        offered = self._message("tools", json.dumps(list(tools))) if tools else []
        return np.array([*offered, *self._messages(messages), BEGIN, *b"assistant\n"], dtype=np.int32)

    def continuation(
        self,
        last: Message,
        ended_with: int | None,
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray:
        closing = [] if ended_with == END else [END]
        return np.array([*closing, *self._messages(new), BEGIN, *b"assistant\n"], dtype=np.int32)

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in self._message(message.role, said(message, thoughts=False))]

    def _message(self, role: str, text: str) -> list[int]:
        return [BEGIN, *f"{role}\n{text}".encode(), END]


def said(message: Message, *, thoughts: bool = True) -> str:
    """Return the text of a message in the format of the test model."""
    calls = [f"<call>{call.name} {call.arguments}</call>" for call in message.tool_calls]
    thought = f"<think>{message.reasoning}</think>" if thoughts and message.reasoning else ""
    return thought + message.content + "".join(calls)


def sampled(message: Message, *, finish: str = "stop", version: str = "0", odd: bool = True) -> SampledTurn:
    """Return a turn with `message`; with `odd`, its ids differ from the encoding of its text."""
    ids = [*said(message).encode(), *([END] if finish != "length" else [])]
    if odd:
        ids = [THINK, *ids]
    return SampledTurn(
        ids=np.array(ids, dtype=np.int64),
        log_probs=-np.arange(1, len(ids) + 1, dtype=np.float64) / 64,
        finish_reason=finish,
        meta_info={
            "weight_version": version,
            "finish_reason": {"type": "length" if finish == "length" else "stop"},
            "prompt_tokens": 10,
            "cached_tokens": 4,
        },
        message=message,
    )


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def tool(call_id: str, text: str) -> Message:
    return Message("tool", text, tool_call_id=call_id)


def assistant(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning=reasoning, tool_calls=calls)


def call(call_id: str, name: str = "bash", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments))
