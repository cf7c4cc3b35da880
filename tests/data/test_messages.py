"""Message contents given as parts and labels given as chat messages: converted to text or rejected with their row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.data.chat_template import normalize_messages
from slime.data.prompt_rows import accepted, label_text, label_use_of_run, normalize_label
from slime.data.prompts import PromptDataset
from slime.data.turn_mask import mask_turns
from slime.errors import UserError

SAYS = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_text_parts_are_joined_with_and_without_a_template(
    write_jsonl: Callable[..., str], byte_tokenizer: Any
) -> None:
    path = write_jsonl([{"input": user(PARTS)}, {"input": user([*PARTS, "?"])}])
    assert [sample.prompt for sample in PromptDataset(path)] == [user("2+2="), user("2+2=?")]
    templated = PromptDataset(path, tokenizer=byte_tokenizer, apply_chat_template=True)
    assert [sample.prompt for sample in templated] == ["<user>2+2=<assistant>", "<user>2+2=?<assistant>"]


def test_parquet_text_parts_may_have_null_keys_of_other_parts(tmp_path: Path) -> None:
    rows = [{"input": user(PARTS)}, {"input": user([{"type": "text", "text": "b", "image": None}])}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parts.parquet")
    assert [sample.prompt for sample in PromptDataset(str(tmp_path / "parts.parquet"))] == [user("2+2="), user("b")]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"role": "user", "content": [*PARTS, IMAGE]},
            "has a part of type 'image_url', but only text is supported",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "has a part of type 'input_audio'"),
        ({"role": "user", "content": {"text": "a"}}, "'content' must be text or a list of parts, not dict"),
        ({"role": "user", "content": 5}, "'content' must be text or a list of parts, not int"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of type 'text' has no 'text'"),
        ({"role": "user", "content": [7]}, "a part of 'content' must be an object with a 'type', not 7"),
        ({"role": "user", "content": None}, "the user message is empty"),
        ({"role": "tool"}, "the tool message is empty"),
    ],
)
def test_rejects_non_text_content_with_file_line_and_message(
    write_jsonl: Callable[..., str], message: dict[str, Any], problem: str
) -> None:
    path = write_jsonl([{"input": "fine"}, {"input": [{"role": "system", "content": "s"}, message]}])
    with pytest.raises(UserError) as caught:
        PromptDataset(path)
    assert str(caught.value).startswith(f"{path}:2: message 1: {problem}")


def test_assistant_message_without_content_is_accepted(byte_tokenizer: Any) -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    assert normalize_messages([{"role": "assistant"}, {"role": "assistant", "tool_calls": calls}], "here") == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    masked = mask_turns(byte_tokenizer, [*user(PARTS), SAYS])
    assert byte_tokenizer.decode(masked.token_ids) == "<user>2+2=<assistant>4"


TARGETS = [
    ("4", "4"),
    (4, 4),
    ([SAYS], [{"role": "assistant", "content": "4"}]),
    (
        [SAYS, *user("sure?"), SAYS],
        [{"role": "assistant", "content": "4"}, *user("sure?"), {"role": "assistant", "content": "4"}],
    ),
]


@pytest.mark.parametrize(("label", "expected"), TARGETS)
def test_target_labels_keep_scalars_and_normalize_messages(
    write_jsonl: Callable[..., str], label: Any, expected: Any
) -> None:
    path = write_jsonl([{"input": user("2+2="), "label": label}])
    assert PromptDataset(path, label_key="label", label_use="target")[0].label == expected


@pytest.mark.parametrize(
    ("label", "expected"),
    [("4", "4"), (4.5, 4.5), (["4", "four"], ["4", "four"]), ([SAYS], "4"), ([*user("well?"), SAYS], "4")],
)
def test_answer_labels_reduce_conversations_to_text(write_jsonl: Callable[..., str], label: Any, expected: Any) -> None:
    path = write_jsonl([{"input": "2+2=", "label": label}])
    assert PromptDataset(path, label_key="label", label_use="answer")[0].label == expected
    assert PromptDataset(path, label_key="label")[0].label == label  # a user function gets the label unchanged


@pytest.mark.parametrize("use", ["answer", "target"])
@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ({"answer": 4}, "the label must be a text"),
        ([{"answer": 4}], "the label must be a text"),
        ([["4"]], "the label must be a text"),
        (user("2+2="), "the label is a conversation without an assistant's message"),
        ([{"role": "assistant", "content": [IMAGE]}], "label: message 0: has a part of type 'image_url'"),
    ],
)
def test_rejects_unusable_labels_with_their_row(
    write_jsonl: Callable[..., str], use: Any, label: Any, problem: str
) -> None:
    path = write_jsonl([{"input": "a", "label": "fine"}, {"input": "b", "label": label}])
    with pytest.raises(UserError) as caught:
        PromptDataset(path, label_key="label", label_use=use)
    assert str(caught.value).startswith(f"{path}:2: {problem}")
    assert PromptDataset(path, label_key="label")[1].label == label


def test_multi_turn_labels_require_a_message_prompt(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    path = write_jsonl([{"input": user("2+2="), "label": [SAYS, *user("sure?"), SAYS]}])
    with pytest.raises(UserError, match=r":1: the label is a conversation of 3 messages.*drop --apply-chat-template"):
        PromptDataset(path, label_key="label", label_use="target", tokenizer=byte_tokenizer, apply_chat_template=True)


@pytest.mark.parametrize(
    ("flags", "use"),
    [
        ({"rm_type": "math"}, "answer"),
        ({"rm_type": "boxed_f1"}, "answer"),
        ({"rm_type": "remote_rm"}, "any"),
        ({}, "any"),
        ({"rm_type": "math", "custom_rm_path": "mine.py"}, "any"),
        ({"rm_type": "math", "custom_generate_function_path": "mine.py"}, "any"),
        ({"rollout_function_path": "slime.rollout.sft_rollout.generate_rollout"}, "target"),
    ],
)
def test_label_use_follows_from_the_flags(flags: dict[str, str], use: str) -> None:
    from slime.config import Config

    assert label_use_of_run(Config(**flags)) == use


@pytest.mark.parametrize(("label", "text"), [("a", "a"), (3, "3"), (0.5, "0.5"), (True, "true"), ([SAYS], "4")])
def test_label_text_of_scalars_and_messages(label: Any, text: str) -> None:
    assert label_text(label) == text
    assert label_text(json.loads(json.dumps(label))) == text


@pytest.mark.parametrize("label", [{"a": 1}, ["a"], None, [{"role": "assistant", "content": ""}]])
def test_rejects_labels_without_a_text_form(label: Any) -> None:
    with pytest.raises(UserError, match="label"):
        label_text(label)


def test_label_error_names_accepted_types_and_the_value() -> None:
    with pytest.raises(UserError) as compared:
        normalize_label({"a": 1}, "answer", "f.jsonl:3")
    assert str(compared.value) == (
        'f.jsonl:3: the label must be a text, a number or a list of accepted answers, not an object ({"a": 1}); for '
        "other labels name a function with --custom-rm-path"
    )
    with pytest.raises(UserError) as trained_on:
        normalize_label(["a"], "target", "f.jsonl:3")
    assert (
        str(trained_on.value) == 'f.jsonl:3: the label must be a text or chat messages to train on, not a list (["a"])'
    )


@pytest.mark.parametrize(("label", "those"), [("a", ["a"]), (["a", 2], ["a", 2]), ([SAYS], [[SAYS]])])
def test_list_labels_give_several_answers_and_conversations_one(label: Any, those: list[Any]) -> None:
    assert accepted(label) == those
