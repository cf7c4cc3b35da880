"""examples/retool: demonstrations, data files, reward and tokenizer. tests/learning/test_tool_use.py tests learning."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config.plugins import load_function

HERE = Path(__file__).resolve().parents[1] / "examples/retool"


def load(name: str) -> Any:
    return load_function(f"{HERE / 'task.py'}:{name}", what=name)


@pytest.fixture(scope="module")
def shown() -> list[dict[str, Any]]:
    return load("demonstrations")(400, seed=3)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_demonstrations_calculate_correctly_but_often_stop_early(shown: list[dict[str, Any]]) -> None:
    early = 0
    for row in shown:
        question, *said = row["messages"]
        right = eval(question["content"])
        last = None
        for call, told in zip(said[:-1:2], said[1:-1:2], strict=True):
            last = eval(call["tool_calls"][0]["function"]["arguments"]["code"], {"_": last})
            assert str(last) == told["content"]
        early += said[-1]["content"] != str(right)
        assert len(said) == (3 if said[-1]["content"] != str(right) else 5)
    assert 0.55 < early / len(shown) < 0.75


def test_held_out_problems_are_in_no_other_file(shown: list[dict[str, Any]], tmp_path: Path) -> None:
    files = load("write_files")(tmp_path, shown, training=500, held_out=50, seed=3)
    asked = {
        name: [row["prompt"][0]["content"] for row in rows(path)]
        for name, path in files._asdict().items()
        if name != "demonstrations"
    }
    copied = [row["messages"][0]["content"] for row in rows(files.demonstrations)]
    assert (len(asked["training"]), len(asked["held_out"])) == (500, 50)
    assert len({*asked["training"], *asked["held_out"], *copied}) == 500 + 50 + 400
    assert all(str(eval(row["prompt"][0]["content"])) == row["label"] for row in rows(files.held_out))


def test_reward_compares_the_recorded_answer_with_the_label() -> None:
    right_answer = load("right_answer")
    assert right_answer(None, SimpleNamespace(metadata={"answer": " 42\n"}, label="42")) == 1.0
    assert right_answer(None, SimpleNamespace(metadata={"answer": "it is 42"}, label="42")) == 0.0
    assert right_answer(None, SimpleNamespace(metadata={}, label="42")) == 0.0


def test_tokenizer_is_compact_and_the_template_allows_continued_turns(
    shown: list[dict[str, Any]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from slime.agent.session.template import ChatTemplate
    from slime.models.parsers.formats import detect_formats

    make_model = load_function(f"{HERE.parent / 'tiny_chat.py'}:make_model", what="make_model")
    words = load_function(f"{HERE / 'task.py'}:demonstration", what="demonstration").__globals__["WORDS"]
    folder = make_model(tmp_path, shown, words=words, seed=1, width=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert detect_formats(tokenizer.chat_template).tool == "hermes"
    assert ChatTemplate(tokenizer).refusal is None
    longest = max(shown, key=lambda row: len(row["messages"]))
    text = tokenizer.apply_chat_template(longest["messages"], tools=longest["tools"], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) < 90
    assert tokenizer.decode(ids) == text
    strange = "any text: é <|im_end|> 日本"
    assert tokenizer.decode(tokenizer.encode(strange)) == strange
