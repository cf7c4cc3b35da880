"""The coding agent example: generated repositories, tasks from files, and attempts that end in rewarded samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from slime.data.chat_template import load_tokenizer
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.sample_pipeline import generate_and_rm
from tests.agent.coding_agent.conftest import EXAMPLE
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn
from tests.e2e.runs import run

PARAMS = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 200, "stop": None, "stop_token_ids": None}
AGENT = [os.path.realpath(sys.executable), "-I", "-S", "-B", str(EXAMPLE / "mini_agent.py")]


def passes(repository, written) -> bool:
    """Return true if the repository's tests pass with this variant of the bug."""
    scope: dict = {}
    exec("\n".join(repository.source(written)), scope)
    exec(repository.tests.replace(f"from {repository.module} import", "#"), scope)
    tests = [value for name, value in scope.items() if name.startswith("test_")]
    assert len(tests) == len(repository.functions)
    with suppress(AssertionError):
        for test in tests:
            test()
        return True
    return False


def test_only_the_correct_line_passes_the_repository_tests():
    from repositories import FAMILIES, make_repository

    seen = set()
    for seed in range(200):
        repository = make_repository(seed)
        bug = repository.bug
        seen.add(bug.family.name)
        assert bug.written != bug.right
        assert {choice: passes(repository, choice) for choice in bug.choices()} == {
            choice: choice == bug.right for choice in bug.choices()
        }
        number, line = repository.bug_line()
        assert repository.source()[number - 1] == line
        assert bug.written in line
    assert seen == {family.name for family in FAMILIES}


def test_seeds_determine_the_repositories():
    from repositories import make_rows

    rows = list(make_rows(20, 7))
    assert rows == list(make_rows(20, 7))
    assert rows[5:] != list(make_rows(15, 13))
    assert len({row["instance_id"] for row in rows}) == 20


def test_trajectory_tool_answers_match_the_agent_program(tmp_path):
    """The tool answers in a trajectory equal the answers of the agent program's tools."""
    from repositories import make_repository
    from tiny import trajectories

    for seed, messages in zip(range(30, 33), trajectories(3, 30), strict=True):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for path, text in make_repository(seed).row()["files"].items():
            (folder / path).write_text(text)
        pairs = [(before, after) for before, after in pairwise(messages) if before.get("tool_calls")]
        calls = [(before["tool_calls"][0]["function"], after["content"]) for before, after in pairs]
        code = (
            f"import json, sys; sys.path.insert(0, {str(EXAMPLE)!r}); import mini_agent\n"
            "calls = json.loads(sys.stdin.read())\n"
            "print(json.dumps([mini_agent.perform({**c, 'arguments': json.dumps(c['arguments'])}) for c in calls]))"
        )
        said = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps([call for call, _ in calls]),
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert json.loads(said) == [answer for _, answer in calls]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_id": None}, "instance_id must be a text, not None"),
        ({"files": {"../x": "1"}}, "files must be an object of texts by their path, below the repository"),
        (
            {"files": {}, "repo": "django/django"},
            "there is nothing to work on: give files, an image, or a repo that is",
        ),
        ({"FAIL_TO_PASS": "[test"}, "FAIL_TO_PASS must be a list of tests"),
    ],
)
def test_rejects_an_invalid_task_and_names_its_line(tmp_path, change, message):
    from tasks import read_tasks

    row = {"instance_id": "a", "problem_statement": "p\u2028q", "test_command": "true", "files": {"a.py": ""}}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n" + json.dumps({**row, **change}) + "\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl:2: " + message.replace("(", r"\(")):
        list(read_tasks(path))


def test_swe_bench_rows_give_the_test_command_and_image():
    from tasks import task_of

    row = {
        "instance_id": "django__django-1",
        "repo": "django/django",
        "problem_statement": "It breaks.",
        "image": "swebench/django-1",
        "workdir": "/testbed",
        "test_patch": "diff --git ...",
        "test_command": "pytest -q {FAIL_TO_PASS} {PASS_TO_PASS}",
        "FAIL_TO_PASS": '["tests/a.py::test_it", "tests/b.py::test[x y]"]',
        "PASS_TO_PASS": ["tests/c.py"],
    }
    task = task_of(row, "here")
    assert task.test_command == "pytest -q tests/a.py::test_it 'tests/b.py::test[x y]' tests/c.py"
    assert (task.image, task.workdir, task.folder) == ("swebench/django-1", "/testbed", None)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(engine, tokenizer, runtime) of a run with the example's generate function and the tiny model's tokenizer."""
    from tiny import make_tokenizer

    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(1).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    facts = {"model_type": "qwen3", "max_position_embeddings": 4096, "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(facts))
    engine = ScriptedEngine(Script(tokenizer))
    with engine.serving() as url:
        flags = {"custom_generate_function_path": str(EXAMPLE / "generate.py"), "max_turns": 6}
        runtime = make_agent_runtime(str(folder), tmp_path_factory.mktemp("run"), [url], **flags)
        yield engine, tokenizer, runtime
        runtime.close()


def run_attempt(world, monkeypatch, repository, texts, command=AGENT, **environment):
    """Run an attempt in which the model answers with these texts; return (sample or samples, turns)."""
    engine, tokenizer, runtime = world
    monkeypatch.setenv("SWE_AGENT", "command")
    monkeypatch.setenv("SWE_AGENT_COMMAND", json.dumps(command))
    monkeypatch.setenv("SWE_AGENT_VISIBLE", str(EXAMPLE))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    turns = [Turn.of(tokenizer, text, seed=seed) for seed, text in enumerate(texts)]
    engine.script = Script(tokenizer, [turns])
    row = repository.row()
    sample = Sample(prompt=row["problem_statement"], metadata=row, index=0, group_index=0)
    return runtime.run(generate_and_rm(runtime, sample, dict(PARAMS))), turns


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("is_right", [True, False])
def test_reward_is_the_test_result_and_samples_have_sampled_tokens(world, monkeypatch, is_right):
    from repositories import make_repository

    repository = make_repository(3)
    bug = repository.bug
    wrong = next(choice for choice in bug.choices() if choice not in (bug.right, bug.written))
    line, text = repository.bug_line(bug.right if is_right else wrong)
    texts = [call("read", path=repository.path), call("edit", path=repository.path, line=line, text=text), "Done."]
    samples, turns = run_attempt(world, monkeypatch, repository, texts)
    [sample] = samples if isinstance(samples, list) else [samples]
    assert sample.status is Sample.Status.COMPLETED, sample.failure
    assert sample.reward == float(is_right)
    mask = np.array(sample.loss_mask, dtype=bool)
    response = np.array(sample.tokens[-sample.response_length :])
    assert response[mask].tolist() == [token for turn in turns for token in turn.ids]
    assert sample.metadata["session"]["retokenised_tokens"] == 0
    assert sample.metadata["harness"]["outcome"] == "finished"
    assert f"+{text}" in sample.metadata["harness"]["diff"]


def test_tests_edited_by_the_agent_do_not_count(world, monkeypatch):
    from repositories import make_repository

    repository = make_repository(3)
    path = f"test_{repository.module}.py"
    texts = [call("edit", path=path, line=1, text="raise SystemExit(0)"), "Done."]
    samples, _ = run_attempt(world, monkeypatch, repository, texts)
    [sample] = samples if isinstance(samples, list) else [samples]
    assert "+raise SystemExit(0)" in sample.metadata["harness"]["diff"]
    assert sample.reward == 0.0


@pytest.mark.parametrize(
    ("command", "environment", "cause"),
    [
        ([AGENT[0], "-c", "import os; os.kill(os.getpid(), 9)"], {}, "CliCrashed: command was ended by signal 9"),
        ([AGENT[0], "-c", "input('?')"], {}, "CliCrashed: command ended with exit code 0 before its first turn"),
        (["/nowhere/agent"], {}, "CliMissing: command could not be started in the sandbox"),
        ([AGENT[0], "-c", "import time; time.sleep(600)"], {"SWE_AGENT_TIME_BUDGET_SEC": "1"},
         "CliTimedOut: command asked for no turn within"),
    ],
)  # fmt: skip
def test_broken_agent_fails_its_sample_with_the_cause(world, monkeypatch, command, environment, cause):
    from repositories import make_repository

    sample, _ = run_attempt(world, monkeypatch, make_repository(3), ["Done."], command=command, **environment)
    assert sample.status is Sample.Status.FAILED
    assert sample.reward is None
    assert cause in sample.failure


def test_failed_sandbox_start_fails_the_sample(world, monkeypatch):
    from repositories import make_repository

    from slime.agent.sandbox import SandboxError
    from slime.agent.sandbox.local import LocalSandbox

    async def refuse(self):
        raise SandboxError("sandbox x did not start: no space left on device")

    monkeypatch.setattr(LocalSandbox, "__aenter__", refuse)
    sample, _ = run_attempt(world, monkeypatch, make_repository(3), ["Done."])
    assert sample.status is Sample.Status.FAILED
    assert "SandboxError: sandbox x did not start: no space left on device" in sample.failure


def test_missing_agent_program_raises_a_user_error(world, monkeypatch):
    from repositories import make_repository

    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(UserError, match=r"^Codex is not installed: npm install -g @openai/codex, or name the program"):
        run_attempt(world, monkeypatch, make_repository(3), ["Done."], SWE_AGENT="codex")


def test_example_runs_end_to_end(tmp_path):
    small = ["--warm-up", "2", "--num-rollout", "1", "--held-out", "2", "--rollout-batch-size", "2"]
    command = [sys.executable, str(EXAMPLE / "run.py"), "--output-dir", "out", *small, "--n-samples-per-prompt", "2"]
    done = run(command, tmp_path)
    assert done.code == 0, done.err
    assert "Of 2 repositories it never trained on it repairs" in done.out
    curve = json.loads((tmp_path / "out/curve.json").read_text())
    assert len(curve["reward"]) == 1
    assert len(curve["held_out"]) == 2
    assert Path(tmp_path / "out/model/config.json").is_file()
