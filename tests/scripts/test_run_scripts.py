"""scripts/run-*.sh: each starts a run of its model with the flags of the caller; mistakes give one error line.

Bash runs every script. The arguments that it passes to the interpreter are planned inside the test, and once by
train.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.cli import main
from slime.config import parse_args
from slime.driver.plan.plan import make_plan
from slime.errors import UserError
from tests.model_files import add_weights

SCRIPTS = Path(__file__).parents[2] / "scripts"
RUNS = sorted(file.stem for file in SCRIPTS.glob("run-*.sh"))
SHELL_FILES = sorted(SCRIPTS.rglob("*.sh"))

TINY = {"NUM_LAYERS": 2, "HIDDEN_SIZE": 64, "FFN_HIDDEN_SIZE": 96, "NUM_ATTENTION_HEADS": 4, "NUM_QUERY_GROUPS": 2}
TINY_MOE = {**TINY, "NUM_EXPERTS": 4, "MOE_ROUTER_TOPK": 2, "MOE_FFN_HIDDEN_SIZE": 32, "DENSE_LAYERS": 1}
PLANS: dict[str, tuple[str, str, str]] = {
    "run-deepseek-r1": ("deepseek_v3", "128 on cpu", "2 on cpu"),
    "run-glm4-9B": ("glm4", "4 on cpu", "4 on cpu"),
    "run-glm4.5-355B-A32B": ("glm4_moe", "64 on cpu", "2 on cpu"),
    "run-kimi-k2-Instruct": ("kimi_k2", "256 on cpu", "4 on cpu"),
    "run-llama3.1-8B-Instruct": ("llama", "8 on cpu", "8 on cpu"),
    "run-moonlight-16B-A3B": ("deepseek_v3", "8 on cpu", "1 on cpu"),
    "run-qwen2.5-7B": ("qwen2", "8 on cpu", "8 on cpu"),
    "run-qwen3-30B-A3B": ("qwen3_moe", "8 on cpu", "1 on cpu"),
    "run-qwen3-4B": ("qwen3", "8 on cpu", "8 on cpu"),
    "run-qwen3-4B-async": ("qwen3", "2 on cpu", "6 on cpu"),
    "run-qwen3-4B-base-sft": ("qwen3", "8 on cpu", ""),
    "run-qwen3-8B": ("qwen3", "8 on cpu", "8 on cpu"),
}
"""Script -> (model_type of its folder, trainers, engines)."""
MIXTURES = ("deepseek_v3", "glm4_moe", "kimi_k2", "qwen3_moe")
ONE_GPU_PER_ENGINE = ["run-glm4-9B", "run-llama3.1-8B-Instruct", "run-qwen2.5-7B", "run-qwen3-4B", "run-qwen3-8B"]
SEVERAL_MACHINES = {"run-deepseek-r1": 16, "run-glm4.5-355B-A32B": 8, "run-kimi-k2-Instruct": 32}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """BASE_DIR as the scripts expect it, without the models."""
    for data in ("dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"):
        file = tmp_path / data
        file.parent.mkdir()
        file.write_text('{"prompt": [{"role": "user", "content": "1+1?"}], "label": "2"}\n')
    return tmp_path


def script(name: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / f"{name}.sh"), *flags],
        cwd="/", env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def command(name: str, place: Path, *flags: str, **env: str) -> list[str]:
    """Returns the arguments that a script passes to the interpreter."""
    recorder = place / "recorder"
    recorder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    done = script(name, *flags, PYTHON=str(recorder), BASE_DIR=str(place), **env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def tiny_model(name: str, place: Path) -> dict[str, str]:
    """Writes a tiny model folder and returns the environment with its sizes. SFT runs get conversations."""
    family = PLANS[name][0]
    numbers = TINY_MOE if family in MIXTURES else TINY
    shape: dict[str, Any] = {
        "model_type": family, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "vocab_size": 320,
    }  # fmt: skip
    if family in MIXTURES:
        count = "num_experts" if family == "qwen3_moe" else "n_routed_experts"
        shape |= {count: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = place / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    add_weights(model)
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    (place / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 128)
    env = {f"MODEL_ARGS_{key}": str(value) for key, value in numbers.items()}
    return {**env, "HF_CHECKPOINT": str(model)} | ({"PROMPT_DATA": f"{place}/chat.jsonl"} if "sft" in name else {})


def rows(plan: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\S[^\n]*?)  +(\S.*)$", plan, re.MULTILINE))


def test_every_script_has_an_expected_plan() -> None:
    assert sorted(PLANS) == RUNS


@pytest.mark.parametrize("name", RUNS)
def test_script_plans_a_run_of_its_model(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, trainers, engines = PLANS[name]
    program, *flags = command(name, place, "--dry-run", "--device", "cpu", "--lr", "3e-6", **tiny_model(name, place))
    assert Path(program).resolve() in (SCRIPTS.parent / "train.py", SCRIPTS.parent / "train_async.py")
    verb = "train-async" if program.endswith("async.py") else "train"
    code = main([verb, *flags])
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    plan = rows(shown.out)
    assert plan["kind"].startswith(f"{family},")
    assert (plan["trainer"], plan.get("engine", "")) == (trainers, engines)
    assert plan["learning rate"].startswith("3e-06")
    assert plan["checkpoints"].endswith("_slime, every 20 rollout steps and at the end")


def test_script_runs_train_py(place: Path) -> None:
    done = script(
        "run-qwen3-4B", "--dry-run", "--device", "cpu", PYTHON=sys.executable, BASE_DIR=str(place), EVAL_DATA="",
        WANDB_PROJECT="", **tiny_model("run-qwen3-4B", place),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    plan = rows(done.stdout)
    assert plan["rollout step"] == "32 prompts x 8 samples = 256 samples"
    assert "evaluation" not in plan


@pytest.mark.parametrize("name", ONE_GPU_PER_ENGINE)
def test_scripts_with_one_gpu_per_engine_need_eight_gpus(name: str, place: Path) -> None:
    _, *flags = command(name, place, **tiny_model(name, place))
    assert make_plan(parse_args(flags), device="cuda", gpu_count=8).gpus_needed == 8


@pytest.mark.parametrize("name", SEVERAL_MACHINES)
def test_multi_node_scripts_are_rejected_on_a_local_cluster(name: str, place: Path) -> None:
    _, *flags = command(name, place, "--rollout-num-gpus-per-engine", "1", **tiny_model(name, place))
    nodes = SEVERAL_MACHINES[name]
    with pytest.raises(UserError) as refused:
        make_plan(parse_args(flags), device="cuda", gpu_count=8)
    assert str(refused.value) == (
        f"--actor-num-nodes {nodes} with --cluster local: this machine is one node; use --cluster ray, or "
        "--actor-num-gpus-per-node alone"
    )


def test_rejects_the_folder_of_another_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_model("run-qwen3-4B", place)["HF_CHECKPOINT"]
    _, *flags = command("run-qwen3-4B", place, "--dry-run", HF_CHECKPOINT=folder)
    assert main(["train", *flags]) == 2
    assert f"--num-layers 36 contradicts num_hidden_layers 2 in {folder}/config.json" in capsys.readouterr().err


def test_missing_environment_variables_are_named(place: Path) -> None:
    without = script("run-qwen3-4B")
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr == (
        "error: HF_CHECKPOINT is missing, the model folder: set it, or set BASE_DIR to the folder that has Qwen3-4B\n"
    )
    half = script("run-qwen3-4B-base-sft", HF_CHECKPOINT="/models/it", SAVE_DIR="/runs/it")
    assert half.returncode == 2
    assert half.stderr.startswith(
        "error: PROMPT_DATA is missing, the conversations to train on: set it, or set BASE_DIR"
    )


def test_wandb_project_variable_enables_wandb(place: Path) -> None:
    words = command("run-qwen3-4B", place, WANDB_PROJECT="a project")
    assert words[-3:] == ["--use-wandb", "--wandb-project", "a project"]


def test_shell_files_are_valid_and_contain_no_forbidden_words() -> None:
    for file in SHELL_FILES:
        subprocess.run(["bash", "-n", str(file)], check=True)
    text = "".join(file.read_text() for file in SHELL_FILES)
    assert not re.search(r"\b(pkill|killall|ray)\b|/root/|/home/", text)
