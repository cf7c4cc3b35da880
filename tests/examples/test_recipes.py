"""examples/recipes: all flags are known and explained, stored plans are current, and one recipe runs to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.conftest import EXAMPLES, modules_of

RECIPES = EXAMPLES / "recipes"
SCRIPTS = sorted(RECIPES.glob("run-*.sh"))
BY_NAME = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
TINY_EXPERTS = (
    "num_hidden_layers=2 hidden_size=64 intermediate_size=96 num_attention_heads=4 num_key_value_heads=2 head_dim=16 "
    "vocab_size=300 num_experts=4 num_experts_per_tok=2 moe_intermediate_size=32"
)
SHORT = (
    "--device cpu --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 --rollout-max-response-len 24 "
    "--max-tokens-per-gpu 4096"
)


@pytest.fixture(scope="module")
def plans() -> Iterator[ModuleType]:
    with modules_of(RECIPES) as module:
        yield module("plans")


def run_script(script: Path, folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    usual = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [str(script), *flags],
        cwd=folder,
        env={**usual, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
    )


def test_recipe_scripts_are_the_seven_expected() -> None:
    assert [script.stem for script in SCRIPTS] == [
        "run-deepseek-v3-dapo",
        "run-glm4-9B-dapo",
        "run-qwen3-0.6B-dapo",
        "run-qwen3-0.6B-gsm8k",
        "run-qwen3-30B-A3B-dapo",
        "run-qwen3-4B-dapo",
        "run-qwen3-4B-gsm8k",
    ]


@BY_NAME
def test_every_flag_has_a_comment(script: Path) -> None:
    lines = script.read_text().splitlines()
    flags = [number for number, line in enumerate(lines) if line.strip().startswith("--")]
    assert len(flags) > 35
    for number in flags:
        own = re.search(r" # \S.{4}", lines[number])
        above = re.match(r"\s*# \S.{4}", lines[number - 1])
        assert own or above, f"{script.name}:{number + 1} explains nothing: {lines[number].strip()}"


@BY_NAME
def test_stored_plans_are_up_to_date(script: Path, plans: ModuleType) -> None:
    """Fails for a mistyped flag too; `python examples/recipes/plans.py` regenerates the files."""
    for gpus in plans.gpu_counts(script):
        plan = plans.planned(script, gpus, 80)
        file = RECIPES / "plans" / f"{script.stem.removeprefix('run-')}-{gpus}.txt"
        assert plan.render() == file.read_text(), "run: python examples/recipes/plans.py"
        assert plan.lacks == 0
        assert plan.gpus_needed == gpus
        assert not [note for note in plan.notes if "without effect" in note]


def test_plan_files_match_the_existing_recipes(plans: ModuleType) -> None:
    made = {f"{one.stem.removeprefix('run-')}-{n}.txt" for one in SCRIPTS for n in plans.gpu_counts(one)}
    assert {file.name for file in (RECIPES / "plans").iterdir()} == made


def test_readme_table_is_up_to_date(plans: ModuleType) -> None:
    assert plans.table() in (RECIPES / "README.md").read_text(), "run: python examples/recipes/plans.py"


def test_mistyped_flag_is_reported(plans: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "run-wrong.sh"
    text = (RECIPES / "run-qwen3-0.6B-gsm8k.sh").read_text()
    text = text.replace('source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"', f"source {RECIPES}/lib.sh")
    script.write_text(text.replace("--rollout-shuffle", "--rollout-shufle"))
    script.chmod(0o755)
    done = run_script(script, tmp_path, PLAN="80")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown flag --rollout-shufle")


def test_plan_mode_prints_the_stored_plan_and_the_readme_note(tmp_path: Path) -> None:
    done = run_script(RECIPES / "run-qwen3-4B-gsm8k.sh", tmp_path, PLAN="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (RECIPES / "plans" / "qwen3-4B-gsm8k-8.txt").read_text()
    all_weights = run_script(RECIPES / "run-glm4-9B-dapo.sh", tmp_path, "--lora-rank", "0", PLAN="80", NUM_GPUS="1")
    (note,) = re.findall(r"the estimate of .*", all_weights.stdout)
    assert note in (RECIPES / "README.md").read_text()
    assert "GiB more than the 80.00 GiB there are: with --fsdp-cpu-offload it is" in note


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, "HF_CHECKPOINT is missing, the model folder: HF_CHECKPOINT=/models/Qwen3-0.6B, after: hf download Qwen/"),
        (
            {"HF_CHECKPOINT": "/no/model"},
            "HF_CHECKPOINT=/no/model: there is no such file or folder, and it should be the ",
        ),
        (
            {"HF_CHECKPOINT": "."},
            "PROMPT_DATA is missing, the prompts to train on: PROMPT_DATA=/data/gsm8k/main/train-",
        ),
        (
            {"HF_CHECKPOINT": ".", "PROMPT_DATA": "rows.jsonl@[0:4]"},
            "EVAL_DATA is missing, the prompts to evaluate on: EVAL_DATA=/data/gsm8k/main/test-00000-of-00001.parquet, or ",
        ),
        (
            {"HF_CHECKPOINT": ".", "PROMPT_DATA": "rows.jsonl", "EVAL_DATA": "no.jsonl"},
            "EVAL_DATA=no.jsonl: there is no ",
        ),
        ({"NUM_GPUS": "3"}, "NUM_GPUS=3: qwen3-0.6B-gsm8k has sizes for 1 8 64 GPUs; take one of them"),
    ],
)
def test_missing_input_is_reported_in_one_sentence(env: dict[str, str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    done = run_script(RECIPES / "run-qwen3-0.6B-gsm8k.sh", tmp_path, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["gsm8k", "dapo"])
def test_rows_in_the_published_formats_are_read(kind: str, tmp_path: Path) -> None:
    """Generated rows in the formats of both data sets pass the start-up checks of a run, as prompts and evaluation."""
    subprocess.run([sys.executable, str(RECIPES / "rows.py"), kind, str(tmp_path / "rows.jsonl")], check=True)
    given = {"PLAN": "80", "PROMPT_DATA": "rows.jsonl", "EVAL_DATA": "rows.jsonl@[:8]"}
    done = run_script(RECIPES / f"run-qwen3-0.6B-{kind}.sh", tmp_path, **given)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1024 in rows.jsonl, an epoch is 32 rollout steps of 32" in done.stdout
    assert re.search(rf"  eval {kind} +8 in rows.jsonl@\[:8\]", done.stdout)
    prompt, label = re.findall(r"  (?:first prompt|its label) +(.*)", done.stdout)
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    if kind == "gsm8k":
        assert prompt.endswith('answer within \\\\boxed{}."}]')
        assert json.loads(label) == first["answer"]
    else:
        assert prompt.endswith('after \\"Answer:\\"."}]')
        assert json.loads(label) == first["reward_model"]["ground_truth"]


@pytest.mark.examples
def test_recipe_with_experts_runs_with_random_weights(tmp_path: Path) -> None:
    """Runs the recipe with experts and a filter; the other recipes differ in flags that their plans parse."""
    name = "qwen3-30B-A3B-dapo"
    script = RECIPES / f"run-{name}.sh"
    env = {"RANDOM_WEIGHTS": "1", "STEPS": "2", "MODEL_SET": TINY_EXPERTS, "NUM_GPUS": "1"}
    done = run_script(script, tmp_path, *SHORT.split(), "--over-sampling-batch-size", "4", **env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "outputs" / name / "metrics.jsonl").read_text().splitlines()]
    norms = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms), "coins are rewards, so there is something to learn from"
    versions = [
        row["train/train_rollout_logprob_abs_diff"] for row in rows if "train/train_rollout_logprob_abs_diff" in row
    ]
    assert max(versions) < 1e-3, "engine and trainer have the same weights"
