"""Published datasets are read without conversion: labels inside objects, labels with worked solutions, and questions
without answer instructions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slime.data.prompts import PromptDataset
from slime.data.readers import read_first_rows
from slime.errors import UserError
from slime.rollout.rewards.math import MathVerifier, dapo_reward

DAPO: list[dict[str, Any]] = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {number} + 1? The last line is Answer: $Answer"}],
        "reward_model": {"ground_truth": str(number + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"n{number}"},
    }
    for number in range(5)
]
GSM8K: list[dict[str, Any]] = [
    {"question": "Ann has 12 x 100 coins. How many?", "answer": "12 x 100 = <<12*100=1200>>1200.\n#### 1,200"},
    {"question": "And without a debt of 3?", "answer": "It is <<0-3=-3>>-3.\n#### -3"},
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_labels_are_read_from_nested_objects(
    tmp_path: Path, write_jsonl: Callable[..., str], kind: str, streaming: bool
) -> None:
    path = write_jsonl(DAPO)
    if kind == "parquet":
        path = str(tmp_path / "dapo.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(DAPO), path, row_group_size=2)
    key = "reward_model.ground_truth"
    dataset = PromptDataset(path, input_key="prompt", label_key=key, label_use="answer", streaming=streaming)
    assert [sample.label for sample in dataset] == ["1", "2", "3", "4", "5"]
    assert dataset[3].prompt == DAPO[3]["prompt"]
    first = read_first_rows(path, columns={"prompt", key}, most_rows=1)[0]
    assert first.row["reward_model"]["ground_truth"] == "1"


def test_unknown_nested_key_error_suggests_a_similar_key(write_jsonl: Callable[..., str]) -> None:
    with pytest.raises(UserError) as refused:
        PromptDataset(write_jsonl(DAPO), input_key="prompt", label_key="reward_model.groundtruth")
    assert "no key 'reward_model.groundtruth'" in str(refused.value)
    assert str(refused.value).endswith("did you mean --label-key reward_model.ground_truth?")
    dotted = write_jsonl([{"input": "x", "a": {"b": 1}, "a.b": 2}], "dotted.jsonl")
    assert PromptDataset(dotted, label_key="a.b")[0].label == 2
    with pytest.raises(UserError, match=r"no key 'input.b'"):
        PromptDataset(dotted, label_key="input.b")


def test_prompt_suffix_is_appended_to_the_last_user_message(
    write_jsonl: Callable[..., str], byte_tokenizer: Any
) -> None:
    suffix = "\nPut it in \\boxed{}."
    read = {"input_key": "question", "label_key": "answer", "prompt_suffix": suffix}
    plain = PromptDataset(write_jsonl(GSM8K), **read)
    assert plain[1].prompt == "And without a debt of 3?\nPut it in \\boxed{}."
    templated = PromptDataset(write_jsonl(GSM8K), **read, apply_chat_template=True, tokenizer=byte_tokenizer)
    assert templated[1].prompt == "<user>And without a debt of 3?\nPut it in \\boxed{}.<assistant>"
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    chat = write_jsonl([{"input": talk}], "chat.jsonl")
    assert PromptDataset(chat, prompt_suffix="!")[0].prompt == [talk[0], {"role": "user", "content": "u!"}, talk[2]]
    alone = write_jsonl([{"input": talk[:1]}], "alone.jsonl")
    with pytest.raises(
        UserError, match=r"alone.jsonl:1: --prompt-suffix is appended to the last user message, but this prompt has"
    ):
        PromptDataset(alone, prompt_suffix="!")
    numbered = write_jsonl([{"input": 7}], "number.jsonl")
    assert PromptDataset(numbered, prompt_suffix="!", any_prompt=True)[0].prompt == 7


@pytest.mark.parametrize(
    ("response", "row", "right"),
    [(r"\boxed{1200}", 0, True), (r"\boxed{1,200}", 0, True), (r"\boxed{120}", 0, False), (r"\boxed{-3}", 1, True)],
)
def test_answers_are_compared_with_the_text_after_the_marker(response: str, row: int, right: bool) -> None:
    verifier = MathVerifier(workers=1)
    try:
        assert asyncio.run(verifier.grade(response, GSM8K[row]["answer"])) == float(right)
    finally:
        verifier.close()
    number = response[len(r"\boxed{") : -1]
    assert dapo_reward(f"Answer: {number}", GSM8K[row]["answer"])["acc"] is right
