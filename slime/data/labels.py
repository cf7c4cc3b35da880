"""What a row's label may be, which depends on who reads it.

Invariant: whoever needs a text gets the text that the file holds. Numbers and truth values are written as in JSON;
chat messages stand for what the assistant says in them; other objects and lists are refused at their row, where only
texts are of use, and handed on as they are to functions of the user.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from slime.data.messages import ASSISTANT, checked_messages, is_conversation
from slime.errors import UserError

LabelUse = Literal["any", "answer", "target"]
"""`any`: a user's function reads it. `answer`: a built-in verifier compares it. `target`: it is trained on."""

BY_RM_TYPE = "slime.rollout.evaluate.by_rm_type"
"""As a sample's `custom_rm_path`: the verifier that its metadata names judges, whatever function the flags name."""

_BY_FUNCTION_OR_NOT_AT_ALL = ("ifbench", "remote_rm", "random")
_SUPERVISED = "slime.rollout.sft_rollout."


def use_of_labels(args: Any) -> LabelUse:
    """What the flags of a run make of its labels."""
    if args.rollout_function_path.startswith(_SUPERVISED):
        return "target"
    own = args.custom_rm_path or args.custom_generate_function_path
    return "any" if own else use_by_verifier(args.rm_type)


def use_by_verifier(rm_type: str | None) -> LabelUse:
    """What `--rm-type` makes of labels; without one a row's metadata or a function decides."""
    if rm_type is None or rm_type.removeprefix("boxed_") in _BY_FUNCTION_OR_NOT_AT_ALL:
        return "any"
    return "answer"


def checked_label(label: Any, use: LabelUse, where: str) -> Any:
    """The label for this use; a `UserError` names the row of one that is of no use."""
    if use == "any" or label is None or isinstance(label, str | int | float):
        return label
    if is_conversation(label):
        messages = checked_messages(label, f"{where}: label")
        if not any(message["role"] == ASSISTANT for message in messages):
            raise UserError(f"{where}: the label is a conversation without an assistant's message")
        return messages if use == "target" else _assistant_text(messages, where)
    if use == "answer" and _is_choice(label):
        return label
    wanted = "a text or chat messages to train on"
    if use == "answer":
        wanted = "a text, a number or a list of accepted ones; --custom-rm-path names a function that may read others"
    raise UserError(f"{where}: the label must be {wanted}, not {_kind(label)}")


def accepted(label: Any) -> list[Any]:
    """The labels of which any will do: a list stands for them, unless it is a conversation."""
    return label if isinstance(label, list) and not is_conversation(label) else [label]


def label_text(label: Any) -> str:
    """A label as the text it is in its file; of chat messages, what the assistant says last."""
    if isinstance(label, str):
        return label
    if isinstance(label, bool | int | float):
        return json.dumps(label)
    if is_conversation(label):
        return _assistant_text(checked_messages(label, "a label"), "a label")
    raise UserError(f"a label must be a text, a number or chat messages here, not {_kind(label)}")


def _assistant_text(messages: list[dict[str, Any]], where: str) -> str:
    said = [message["content"] for message in messages if message["role"] == ASSISTANT and message["content"]]
    if not said:
        raise UserError(f"{where}: the label is a conversation in which the assistant says nothing")
    return said[-1]


def _is_choice(label: Any) -> bool:
    return isinstance(label, list) and bool(label) and all(isinstance(one, str | int | float) for one in label)


def _kind(label: Any) -> str:
    names = {dict: "an object", list: "a list", type(None): "null"}
    return f"{names.get(type(label), type(label).__name__)} ({json.dumps(label, default=str):.60})"
