from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slime.data.chat_template import load_tokenizer, model_context_length, prompt_text
from slime.data.prompts import PromptDataset, StreamedPromptTooLong
from slime.data.readers import open_rows, split_slice
from slime.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"input": f"question {number}", "answer": number, "metadata": {"n": number}} for number in range(20)
]


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_jsonl_rows_become_prototypes(write_jsonl: Callable[..., str], streaming: bool) -> None:
    dataset = PromptDataset(write_jsonl(ROWS), label_key="answer", streaming=streaming)
    assert len(dataset) == 20
    assert dataset[7].prompt == "question 7"
    assert dataset[7].label == 7
    assert dataset[7].metadata == {"n": 7}
    assert [sample.label for sample in dataset] == list(range(20))


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_and_jsonl_give_the_same_samples(
    tmp_path: Path, write_jsonl: Callable[..., str], streaming: bool
) -> None:
    rows = [{**row, "unused": "x" * 10} for row in ROWS]
    parquet = PromptDataset(write_parquet(tmp_path / "p.parquet", rows), label_key="answer", streaming=streaming)
    jsonl = PromptDataset(write_jsonl(rows), label_key="answer")
    assert list(parquet) == list(jsonl)
    assert [parquet[index].label for index in (19, 0, 10)] == [19, 0, 10]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[2:5]", [2, 3, 4]),
        ("[:3]", [0, 1, 2]),
        ("[-2:]", [18, 19]),
        ("[17:99]", [17, 18, 19]),
        ("[:]", list(range(20))),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_path_slices_select_rows(
    tmp_path: Path, write_jsonl: Callable[..., str], text: str, expected: list[int], kind: str, streaming: bool
) -> None:
    path = write_jsonl(ROWS) if kind == "jsonl" else write_parquet(tmp_path / "p.parquet", ROWS)
    dataset = PromptDataset(f"{path}@{text}", label_key="answer", streaming=streaming)
    assert [sample.label for sample in dataset] == expected


def test_split_slice_accepts_at_signs_and_rejects_single_indices() -> None:
    assert split_slice("dir@home/a.jsonl") == ("dir@home/a.jsonl", slice(None))
    with pytest.raises(UserError, match=r"write the slice as path@\[start:stop\]"):
        split_slice("a.jsonl@[3]")


def test_chat_template_receives_tools_and_kwargs(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    rows = [
        {"input": messages, "tools": [{"name": "search"}], "metadata": json.dumps({"k": 1})},
        {"input": "plain words", "tools": None, "metadata": None},
    ]
    path = write_jsonl(rows)
    templated = PromptDataset(
        path,
        tokenizer=byte_tokenizer,
        apply_chat_template=True,
        apply_chat_template_kwargs={"enable_thinking": True},
    )
    assert templated[0].prompt == "[1 tools]<system>be brief<user>hi<assistant><think>"
    assert templated[0].metadata == {"k": 1, "tools": [{"name": "search"}]}
    assert templated[0].apply_chat_template_kwargs == {"enable_thinking": True}
    assert templated[1].prompt == "<user>plain words<assistant><think>"
    assert templated[1].metadata == {}
    assert PromptDataset(path)[0].prompt == messages


def test_parquet_messages_drop_null_fields_from_other_rows(tmp_path: Path) -> None:
    rows = [
        {"input": [{"role": "user", "content": "a"}]},
        {"input": [{"role": "assistant", "content": None, "name": "b"}, {"role": "user", "content": "c"}]},
    ]
    dataset = PromptDataset(write_parquet(tmp_path / "chat.parquet", rows))
    assert [sample.prompt for sample in dataset] == [
        [{"role": "user", "content": "a"}],
        [{"role": "assistant", "content": "", "name": "b"}, {"role": "user", "content": "c"}],
    ]


def test_any_prompt_keeps_prompts_that_are_not_text(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    prompts: list[Any] = [0, 12, 0.5, {"task": 3}, [1, 2], "text", [{"role": "user", "content": "hi"}]]
    rows = [{"index": prompt} for prompt in prompts]
    found = PromptDataset(write_jsonl(rows), input_key="index", any_prompt=True, prompt_suffix="!", max_prompt_len=4)
    kept = [*prompts[:5], "text!", [{"role": "user", "content": "hi!"}]]
    assert [sample.prompt for sample in found] == kept
    assert [type(sample.prompt) for sample in found] == [type(prompt) for prompt in kept]
    templated = PromptDataset(
        write_jsonl(rows), tokenizer=byte_tokenizer, input_key="index", any_prompt=True, apply_chat_template=True
    )
    assert [sample.prompt for sample in templated][:5] == prompts[:5]
    assert templated[6].prompt == "<user>hi<assistant>"
    for prompt, said in ((True, "not bool"), (None, "not NoneType"), ([], "the prompt is empty")):
        with pytest.raises(UserError, match=said):
            PromptDataset(write_jsonl([{"index": prompt}]), input_key="index", any_prompt=True)
    with pytest.raises(UserError, match="a prompt must be a string or a list of messages, not int"):
        PromptDataset(write_jsonl(rows), input_key="index")
    with pytest.raises(ValueError, match="sample None: its prompt 12 is neither text nor messages"):
        prompt_text(byte_tokenizer, found[1])


def test_prompt_column_is_inferred_if_only_one_usual_name_exists(tmp_path: Path) -> None:
    for key in ("input", "prompt", "messages", "question", "problem"):
        path = write_parquet(tmp_path / f"{key}.parquet", [{key: "who?", "answer": "I"}])
        assert PromptDataset(path)[0].prompt == "who?"
    both = write_parquet(tmp_path / "both.parquet", [{"prompt": "a", "input": "b", "question": "c"}])
    assert PromptDataset(both)[0].prompt == "b"
    assert PromptDataset(both, input_key="question")[0].prompt == "c"
    two = write_parquet(tmp_path / "two.parquet", [{"prompt": "a", "question": "c"}])
    with pytest.raises(UserError, match="no key 'input', and the prompt may be any of prompt, question: name it with"):
        PromptDataset(two)
    with pytest.raises(UserError, match="no key 'input'; this row has"):
        PromptDataset(two, input_key="input")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "a"}\n\n{"input": "b",}\n', r"bad\.jsonl:3: not valid JSON .* at column"),
        ('{"input": "a"}\n["b"]\n', r"bad\.jsonl:2: a row must be a JSON object, this is a list"),
        (b'{"input": "a"}\n{"input": "\xff"}\n', r"bad\.jsonl:2: not valid UTF-8"),
        ('{"input": "a"}\n{"text": "b", "id": 1}\n', r"bad\.jsonl:2: no key 'input'; this row has \['id', 'text'\]"),
        ('{"input": "a"}\n{"input": 5}\n', r"bad\.jsonl:2: a prompt must be a string or a list of messages, not int"),
        ('{"input": "a"}\n{"input": ""}\n', r"bad\.jsonl:2: the prompt is empty"),
        ('{"input": "a"}\n{"input": [{"content": "b"}]}\n', r"bad\.jsonl:2: message 0: a chat message must be"),
        (
            '{"input": "a"}\n{"input": "b", "metadata": [1]}\n',
            r"bad\.jsonl:2: 'metadata' must be a JSON object, not list",
        ),
        ('{"input": "a"}\n{"input": "b", "metadata": "{"}\n', r"bad\.jsonl:2: 'metadata' is text but not valid JSON"),
        ('{"input": "a"}\n{"input": "b", "tools": {}}\n', r"bad\.jsonl:2: 'tools' must be a list"),
        ("\n \n", r"has no rows"),
        ("", r"has no rows"),
    ],
)
def test_bad_rows_are_reported_with_their_line(
    tmp_path: Path, content: str | bytes, message: str, streaming: bool
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        list(PromptDataset(str(path), streaming=streaming))


def test_unreadable_files_are_reported(tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "broken.parquet").write_text("not parquet")
    for path, message in (
        (str(tmp_path / "none.jsonl"), r"none\.jsonl: no such file"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "a.csv"), r"unsupported extension '\.csv'; use \.jsonl or \.parquet"),
        (str(tmp_path / "broken.parquet"), "cannot be read as Parquet"),
        (write_jsonl(ROWS) + "@[30:40]", "has no rows"),
    ):
        with pytest.raises(UserError, match=message):
            PromptDataset(path)


def test_missing_key_error_lists_the_existing_keys(tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    with pytest.raises(
        UserError, match=r"prompts\.jsonl:1: no key 'label'; .*\['answer', 'input', 'metadata'\].*--label-key"
    ):
        PromptDataset(write_jsonl(ROWS), label_key="label", streaming=True)
    with pytest.raises(
        UserError, match=r"row 0: no key 'text'; this row has \['answer', 'input', 'metadata'\].*--input-key"
    ):
        PromptDataset(write_parquet(tmp_path / "p.parquet", ROWS), input_key="text")


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\n')
    assert PromptDataset(str(path))[0].prompt == "a"


def test_chat_template_errors_are_reported(
    write_jsonl: Callable[..., str], plain_tokenizer: Any, byte_tokenizer: Any
) -> None:
    with pytest.raises(UserError, match="--apply-chat-template needs a tokenizer with a chat template"):
        PromptDataset(write_jsonl(ROWS), tokenizer=plain_tokenizer, apply_chat_template=True)
    refusing = with_chat_template(byte_tokenizer, "{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match=r"prompts\.jsonl:1: the chat template refuses this prompt \(no system role\)"):
        PromptDataset(write_jsonl(ROWS), tokenizer=refusing, apply_chat_template=True)


def with_chat_template(tokenizer: Any, chat_template: str) -> Any:
    import copy

    changed = copy.deepcopy(tokenizer)
    changed.chat_template = chat_template
    return changed


LENGTHS = [3, 9, 5, 12, 8, 1]


def length_rows() -> list[dict[str, Any]]:
    # 'é' has two bytes, so the length must come from the tokenizer, not from the number of characters.
    return [{"input": "é" * (length // 2) + "x" * (length % 2), "id": length} for length in LENGTHS]


def test_long_prompts_are_dropped_and_counted(
    write_jsonl: Callable[..., str], byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(
            write_jsonl(length_rows()), tokenizer=byte_tokenizer, label_key="id", max_prompt_len=8, max_context=10
        )
    assert [sample.label for sample in dataset] == [3, 5, 8, 1]
    assert len(dataset) == 4
    assert caplog.messages == ["dropped 2 of 6 prompts longer than 8 tokens"]
    with pytest.raises(UserError, match="all 6 prompts are longer than 0 tokens; raise --rollout-max-prompt-len"):
        PromptDataset(write_jsonl(length_rows()), tokenizer=byte_tokenizer, max_prompt_len=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_rejects_a_prompt_that_fills_the_context(
    write_jsonl: Callable[..., str], byte_tokenizer: Any, streaming: bool
) -> None:
    with pytest.raises(
        UserError, match=r"prompts\.jsonl:4: the prompt has 12 tokens and leaves no room .* context of 12"
    ):
        list(PromptDataset(write_jsonl(length_rows()), tokenizer=byte_tokenizer, max_context=12, streaming=streaming))


def test_message_prompt_length_includes_the_template(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    rows = [{"input": [{"role": "user", "content": text}]} for text in ("é", "éé")]
    rendered = len("<user>é<assistant>".encode())
    dataset = PromptDataset(write_jsonl(rows), tokenizer=byte_tokenizer, max_prompt_len=rendered)
    assert [sample.prompt for sample in dataset] == [rows[0]["input"]]


def test_epoch_order_is_the_same_with_and_without_streaming(
    write_jsonl: Callable[..., str], byte_tokenizer: Any
) -> None:
    path = write_jsonl(length_rows() * 5)

    def walk(streaming: bool, epoch: int, shuffle: bool) -> list[int]:
        dataset = PromptDataset(path, tokenizer=byte_tokenizer, label_key="id", max_prompt_len=8, streaming=streaming)
        labels = []
        for index in dataset.epoch_order(7, epoch, shuffle):
            try:
                labels.append(dataset[int(index)].label)
            except StreamedPromptTooLong:
                continue
        return labels

    for epoch, shuffle in ((0, False), (0, True), (1, True)):
        assert walk(True, epoch, shuffle) == walk(False, epoch, shuffle)
    assert walk(False, 0, True) != walk(False, 1, True)
    assert sorted(walk(False, 0, True)) == sorted([3, 5, 8, 1] * 5)
    assert walk(False, 5, False) == [3, 5, 8, 1] * 5


def test_workers_give_the_same_prototypes_and_errors(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    rows = [{"input": f"{number} " + "é" * (number % 13), "id": number} for number in range(1200)]
    options: dict[str, Any] = {
        "tokenizer": byte_tokenizer,
        "label_key": "id",
        "apply_chat_template": True,
        "max_prompt_len": 40,
    }
    inline = PromptDataset(write_jsonl(rows), **options)
    parallel = PromptDataset(write_jsonl(rows), num_workers=2, **options)
    assert 0 < len(inline) < 1200
    assert list(parallel) == list(inline)
    assert (parallel.epoch_order(1, 0, True) == inline.epoch_order(1, 0, True)).all()
    rows[1100] = {"input": 5, "id": 0}
    with pytest.raises(UserError, match=r"prompts\.jsonl:1101: a prompt must be"):
        PromptDataset(write_jsonl(rows), num_workers=1, **options)


def test_tokenizer_and_context_are_read_from_the_model_folder(model_folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(str(model_folder)).encode("abc", add_special_tokens=False) != []
    assert model_context_length(str(model_folder)) == 64
    empty = tmp_path / "empty"
    empty.mkdir()
    assert model_context_length(str(empty)) is None
    with pytest.raises(UserError, match="empty: has no tokenizer"):
        load_tokenizer(str(empty))
    with pytest.raises(UserError, match="nowhere: not a model folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (empty / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="its tokenizer does not load"):
        load_tokenizer(str(empty))


def test_rows_come_from_the_indexed_file_when_another_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "first"}\n{"input": "second"}\n')
    rows = open_rows(str(path), columns={"input"})
    assert len(rows) == 2
    other = tmp_path / "other.jsonl"
    other.write_text('{"input": "a much longer row"}\n')
    other.replace(path)
    assert rows[1] == {"input": "second"}
