"""Plans and prompt files: rows are counted and shown, and runs whose responses cannot be scored are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slime.config import Config, resolve
from slime.data.readers import open_rows, read_first_rows
from slime.driver.plan.plan import make_plan
from slime.errors import UserError
from tests.test_plan import flags

__all__ = ["flags"]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that writes rows to a .jsonl file and returns its path."""

    def to_file(*rows: dict[str, Any], name: str = "own.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return to_file


def plan_text(flags: dict[str, Any], **changes: Any) -> str:
    reward_given = changes.pop("reward_given", False)
    config = resolve(Config(**{**flags, **changes}))
    return make_plan(config, device="cpu", gpu_count=0, reward_given=reward_given).render()


def error_of(flags: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan_text(flags, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_REWARD = (
    "nothing gives the responses a reward: name a verifier with --rm-type (math, dapo, deepscaler, f1, gpqa, ifbench, remote_rm, "
    "random) or a function with --custom-rm-path; {where} names no rm_type in its metadata either"
)


def test_rejects_a_run_without_any_reward(flags: dict[str, Any], write: Write, tmp_path: Path) -> None:
    where = f"{flags['prompt_data']}:1"
    assert error_of(flags, rm_type=None) == NO_REWARD.format(where=where)
    typed = {"input": "1", "label": "1", "metadata": {"rm_type": "math"}}
    plan_text(flags, rm_type=None, prompt_data=write(typed))
    half = write(typed, {"input": "1", "label": "1"})
    assert error_of(flags, rm_type=None, prompt_data=half) == NO_REWARD.format(where=f"{half}:2")
    wrong = write({**typed, "metadata": {"rm_type": "maths"}})
    assert error_of(flags, prompt_data=wrong).startswith(
        f"{wrong}:1: rm_type 'maths' in its metadata must be one of math"
    )


def test_accepts_every_source_of_rewards(flags: dict[str, Any], tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "async def generate(args, sample, sampling_params): return sample\n"
        "def hook(args, sample): return None\n"
        "def reward(args, sample): return 1.0\n"
        "def rollout(args, rollout_id, data_source, evaluation=False): return []\n"
    )
    bare = {**flags, "rm_type": None, "label_key": None}
    plan_text(bare, reward_given=True)
    plan_text(bare, custom_rm_path=f"{plugin}:reward")
    plan_text(bare, custom_generate_function_path=f"{plugin}:generate")
    plan_text(bare, rollout_sample_hook_path=[f"{plugin}:hook"])
    plan_text(bare, rollout_function_path=f"{plugin}:rollout")
    plan_text(bare, use_opd=True, opd_type="trainer", opd_teacher_load=flags["hf_checkpoint"])
    plan_text(flags, rm_type="random", label_key=None)
    lettered = tmp_path / "lettered.jsonl"
    lettered.write_text('{"input": "1", "metadata": {"correct_letter": "A"}}\n')
    plan_text(flags, rm_type="gpqa", label_key=None, prompt_data=str(lettered))


def test_distillation_without_labels_is_noted_not_rejected(flags: dict[str, Any]) -> None:
    taught = flags | {"use_opd": True, "opd_type": "trainer", "opd_teacher_load": flags["hf_checkpoint"]}
    note = "--rm-type math compares with a label and there is no --label-key: responses without a label get no reward"
    assert note in plan_text(taught, label_key=None)
    for labelled in ({}, {"rm_type": "random", "label_key": None}, {"rm_type": None, "label_key": None}):
        assert "compares with a label" not in plan_text(taught, **labelled)


def test_rejects_a_verifier_without_labels(flags: dict[str, Any], write: Write) -> None:
    file = flags["prompt_data"]
    assert error_of(flags, label_key=None) == (
        f"--rm-type math compares with a label: name its column with --label-key ({file}:1 has ['input', 'label']): "
        "did you mean --label-key label?"
    )
    assert error_of(flags, label_key="lable") == (
        f"{file}:1: no key 'lable'; this row has ['input', 'label']; did you mean --label-key label?"
    )
    assert error_of(flags, input_key="question") == (
        f"{file}:1: no key 'question'; this row has ['input', 'label']; choose one with --input-key"
    )
    null = write({"input": "1", "label": "1"}, {"input": "2", "label": None})
    assert error_of(flags, prompt_data=null) == (
        f"{null}:2: 'label' is null, but --rm-type math compares with it: fill it in"
    )
    typed = write({"input": "1", "metadata": {"rm_type": "boxed_gpqa"}})
    assert error_of(flags, prompt_data=typed, label_key=None).startswith("--rm-type boxed_gpqa compares with a label")


def test_evaluation_data_is_checked_too(flags: dict[str, Any], write: Write, tmp_path: Path) -> None:
    bare = write({"input": "1"})
    data = {"eval_prompt_data": [("held-out", bare)], "eval_interval": 1}
    assert error_of(flags, **data) == f"{bare}:1: no key 'label'; this row has ['input']; choose one with --label-key"
    answered = write({"input": "1", "label": "2"}, name="answered.jsonl")
    sft = {**flags, "rm_type": None, "loss_type": "sft_loss"}
    assert error_of(sft, eval_prompt_data=[("a", answered)], eval_interval=1) == NO_REWARD.format(where=f"{answered}:1")
    file = tmp_path / "eval.yaml"
    file.write_text(f"eval: {{datasets: {{a: {{path: {answered}, rm_type: math}}}}}}\n")
    plan_text(sft, eval_config=str(file), eval_interval=1)
    plan_text({**flags, "rm_type": None}, num_rollout=0, eval_config=str(file))


def test_rejects_sft_rows_without_an_answer(flags: dict[str, Any], write: Write) -> None:
    sft = {**flags, "loss_type": "sft_loss", "label_key": None, "rm_type": None}
    file = write({"input": "1+1=", "answer": "2"})
    assert error_of(sft, prompt_data=file) == (
        f"{file}:1: there is no answer to train on: name its column with --label-key, or end the messages with an "
        "assistant turn, without --apply-chat-template (it has ['answer', 'input']): did you mean --label-key answer?"
    )
    plan_text(sft, prompt_data=file, label_key="answer")
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    plan_text(sft, prompt_data=write({"input": turns}))
    assert "no answer" in error_of(sft, prompt_data=write({"input": turns}), apply_chat_template=True)
    assert "no answer" in error_of(sft, prompt_data=write({"input": turns[:1]}))


def test_dry_run_counts_and_shows_the_data(flags: dict[str, Any], write: Write, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
                "{% if add_generation_prompt %}<assistant>{% endif %}",
                "eos_token": {"content": "<e>"},
            }
        )
    )
    long = "x" * 300
    file = write(*({"input": f"{i}+1=" if i else long, "label": str(i + 1)} for i in range(70)))
    data = {"prompt_data": file, "eval_prompt_data": [("few", f"{file}@[:3]")], "eval_interval": 1, "dry_run": True}
    text = plan_text(flags, **data, num_rollout=None, num_epoch=3)
    assert f"  prompts           70 in {file}, an epoch is 2 rollout steps of 32\n" in text
    assert f'  first prompt      "{"x" * 65} ... {"x" * 33}"\n' in text
    assert '  its label         "1"\n' in text
    assert f"  eval few          3 in {file}@[:3]\n" in text
    assert "3 x 2 rollout steps" in text
    rendered = plan_text(flags, **{**data, "prompt_data": f"{file}@[1:]"}, apply_chat_template=True)
    assert '  first prompt      "<user>1+1=<e><assistant>"\n' in rendered
    assert "69 in" in rendered
    assert "first prompt" not in plan_text(flags, prompt_data=file)


def test_read_first_rows_matches_open_rows(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n" + "".join(f'{{"a": {i}, "b": "{i}"}}\n\n' for i in range(300)))
    columns = tmp_path / "rows.parquet"
    table = pyarrow.table({"a": list(range(300)), "b": [str(i) for i in range(300)]})
    pyarrow.parquet.write_table(table, columns, row_group_size=64)
    for file in (lines, columns):
        for part in ("", "@[130:]", "@[5:8]", "@[-3:]", "@[:-290]", "@[64:128]"):
            wanted = open_rows(f"{file}{part}", columns={"a"})
            found = read_first_rows(f"{file}{part}", columns={"a"})
            assert len(found) == min(100, len(wanted))
            assert [(one.where, one.row) for one in found] == [(wanted.where(i), wanted[i]) for i in range(len(found))]
        for part in ("@[300:]", "@[8:8]", "@[9:8]"):
            with pytest.raises(UserError, match="has no rows"):
                read_first_rows(f"{file}{part}", columns={"a"})
    lines.write_text('{"a": 1}\n{broken\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2: not valid JSON"):
        read_first_rows(str(lines), columns={"a"})
    columns.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"rows.parquet: cannot be read as Parquet"):
        read_first_rows(str(columns), columns={"a"})


def test_only_the_beginning_of_a_large_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large.jsonl"
    row = json.dumps({"a": "x" * 400_000}) + "\n"
    file.write_text(row * 4 + "{broken\n")
    assert len(read_first_rows(str(file), columns={"a"})) == 3


def test_datasets_of_a_mixture_are_checked_and_counted(flags: dict[str, Any], write: Write, tmp_path: Path) -> None:
    good = write(*({"input": f"{i}+1=", "label": str(i + 1)} for i in range(40)), name="good.jsonl")
    bare = write({"q": "1"}, {"q": "2"}, name="bare.jsonl")
    judge = tmp_path / "judge.py"
    judge.write_text("def score(args, sample):\n    return 1.0\n")
    file = tmp_path / "tasks.yaml"
    mixed = {**flags, "prompt_data": None, "prompt_config": str(file), "rm_type": None, "dry_run": True}

    def tasks(bare_entries: str) -> None:
        file.write_text(
            f"train:\n  datasets:\n    - {{name: sums, path: {good}, weight: 3, rm_type: math}}\n"
            f"    - {{name: bare, path: {bare}, {bare_entries}}}\n"
        )

    tasks("input_key: q")
    assert error_of(mixed) == f"{bare}:1: no key 'label'; this row has ['q']; choose one with --label-key"
    file.write_text(f"train: {{datasets: {{sums: {good}}}}}")
    assert error_of(mixed) == NO_REWARD.format(where=f"{good}:1")
    plan_text({**mixed, "rm_type": "f1"})
    write({"q": "1", "label": "1"}, {"q": "2", "label": "2"}, name="bare.jsonl")
    tasks(f"input_key: q, custom_rm_path: '{judge}:score'")
    text = " ".join(plan_text(mixed, rollout_batch_size=8).split())
    assert "all prompts 42, an epoch is 5 rollout steps of 8" in text
    assert f"40 in {good}, 75% of all as sums" in text
    assert f"2 in {bare}, 25% of all as bare" in text


def test_prompt_column_is_inferred_and_logged(
    flags: dict[str, Any], write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    asked = write({"question": "1+1", "label": "2"})
    text = " ".join(plan_text(flags, input_key=None, prompt_data=asked, dry_run=True).split())
    assert f"1 in {asked} (column question)" in text
    assert '"1+1' in text
    assert f"{asked}: prompts are read from 'question' (no --input-key is given)" in caplog.messages
    caplog.clear()
    plan_text(flags, input_key="question", prompt_data=asked)
    assert not caplog.messages
    two = write({"question": "1+1", "problem": "1+1", "label": "2"})
    assert "the prompt may be any of question, problem: name it with --input-key" in error_of(flags, prompt_data=two)


def test_non_text_prompts_need_a_custom_generate_or_rollout_function(
    flags: dict[str, Any], write: Write, tmp_path: Path
) -> None:
    tasks = {
        "prompt_data": write({"index": 0}, {"index": 1}),
        "input_key": "index",
        "label_key": None,
        "rm_type": "random",
        "dry_run": True,
    }
    assert "must be a string or a list of messages, not int" in error_of(flags, **tasks)
    (tmp_path / "mine.py").write_text(
        "async def generate(args, sample, sampling_params): return sample\n"
        "def rollout(args, rollout_id, data_source, evaluation=False): return []\n"
    )
    for flag, name in (("custom_generate_function_path", "generate"), ("rollout_function_path", "rollout")):
        text = " ".join(plan_text(flags, **tasks, **{flag: f"{tmp_path}/mine.py:{name}"}).split())
        assert "first prompt 0 " in text
