"""Runs the commands and code blocks of the documents about slime (documents.md) on a CPU with a tiny model.

Bash parses each command as typed, in a folder with `scripts/` and `train.py`. One test passes it to the real
interpreter; the others pass it to a script that prints the words, which then start the real train.py from a process
that has imported torch already (docs/testing.md). The environment selects the model: `HF_CHECKPOINT`, and the sizes of
a tiny model for scripts/models.

The two GRPO commands run as typed, with up to eight trainers, eight engines and 256 samples per step, until Ctrl-C. The
others get smaller sizes, and required flags that the documents leave out.

Not run: `docker pull`, `docker run` and `git clone` (there is no image, and this is the checkout); `pip install -r
requirements.txt` and `pip install -e .` (tests/test_packaging.py checks their files); `tensorboard --logdir outputs/`
(a test reads the event files instead).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import GenerationConfig

from slime.cli import main
from slime.config import parse_args
from slime.data.buffer.database import open_read_only
from slime.data.buffer.reader import NAME, Choice, Reader
from slime.data.sample import Sample
from tests.e2e.runs import ROOT, Done, Running, records, run, started, wait_until
from tests.model_files import add_weights
from tests.tiny_models import VOCAB, make_model_folder

DOCUMENTS = (Path(__file__).parent / "documents.md").read_text()
TINY = {
    "MODEL_ARGS_NUM_LAYERS": "2", "MODEL_ARGS_HIDDEN_SIZE": "64", "MODEL_ARGS_FFN_HIDDEN_SIZE": "96",
    "MODEL_ARGS_NUM_ATTENTION_HEADS": "4", "MODEL_ARGS_NUM_QUERY_GROUPS": "2", "MODEL_ARGS_KV_CHANNELS": "16",
    "MODEL_ARGS_VOCAB_SIZE": str(VOCAB), "MODEL_ARGS_ROTARY_BASE": "10000", "HF_CHECKPOINT": "tiny", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
ONE_EACH = ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
ONE_STEP = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "1", "--input-key", "prompt"]

GENERATE_HELPERS = """
async def generate_single(conversation):
    return "call 2" if len(conversation) == 1 else f"answer {conversation[-1]['content']}"

def extract_tool_call(response):
    return response.split()[1] if response.startswith("call") else None

def execute_tool(call):
    return str(2 * int(call))

def compute_reward(sample):
    return float(sample.index % 2) if sample.response == "answer 4" else -1.0
"""
REWARD_HELPERS = """
import torch

def load_model(model_path):
    return lambda inputs: torch.tensor([float(len(model_path) + len(response)) for _, response in inputs])

CustomRewardModel.tokenize = lambda self, prompts, responses: list(zip(prompts, responses))
"""
SOURCE_HELPERS = """
from slime.utils.types import Sample

class Dataset:
    def sample(self, num_samples):
        return [Sample(prompt="What is 2 + 2?", label="4") for _ in range(num_samples)]

RolloutDataSource.dataset = Dataset()

def select_best(buffer, num_samples):
    return buffer[:num_samples]
"""


def block(name: str) -> str:
    """The block of code under a heading."""
    found = re.search(rf"^## {re.escape(name)}\n```\w+\n(.*?)^```", DOCUMENTS, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found.group(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as the commands see it, with the user's files: a tiny model and the documented data.

    The data adds what the documents leave out: the default column of `--input-key`, and for each row a verifier that
    needs no label, because no documented flag names one.
    """
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("scripts", "train.py", "train_async.py"):
        (folder / name).symlink_to(ROOT / name)
    make_model_folder(folder / "tiny")
    GenerationConfig(eos_token_id=list(range(2, VOCAB, 2)), pad_token_id=0).save_pretrained(folder / "tiny")
    plain = [json.loads(line) for line in block("data").splitlines()]
    chat = json.loads(block("chat data"))
    agent = {"prompt": [{"role": "user", "content": "2*2"}], "label": "4"}
    for name, rows in {
        "data": plain, "train": [*plain, chat], "agent_data": [agent], "aime": plain[:1], "gsm8k": [chat],
    }.items():  # fmt: skip
        full = [{**row, "input": row["prompt"], "metadata": {"rm_type": "random"}} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in full))
    (folder / "custom_generate.py").write_text(GENERATE_HELPERS + block("custom_generate.py"))
    (folder / "custom_rm.py").write_text(block("custom_rm.py") + REWARD_HELPERS)
    (folder / "data_sources.py").write_text(block("data_sources.py") + SOURCE_HELPERS)
    shim = folder / "bin" / "python"
    shim.parent.mkdir()
    shim.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    return folder


def typed(command: str, place: Path) -> list[str]:
    """Command line that bash passes to the interpreter; the model's flags are sourced if the command does not."""
    sourced = "" if "source " in command else "source scripts/models/qwen3-4B.sh\n"
    done = subprocess.run(
        ["bash", "-c", sourced + command.replace("/path/to", str(place))],
        cwd=place, env={**os.environ, **TINY, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    program, *words = done.stdout.splitlines()
    assert done.stderr == ""
    return [sys.executable, str(ROOT / program), *words]


def samples(run_dir: Path) -> list[Sample]:
    with open_read_only(run_dir / NAME) as connection:
        return [found.sample for found in Reader(connection).samples(Choice(state="consumed"))]


def run_folder(running: Running, place: Path) -> Path:
    """Output folder printed by a run without --output-dir."""
    words = "the run's files go to "
    running.wait_for(words)
    return place / running.lines[-1].split(words)[1].strip()


def wait_for(running: Running, event: Callable[[], bool]) -> None:
    assert wait_until(lambda: event() or running.popen.poll() is not None, within_s=600)
    assert running.popen.poll() is None, running.finish()


def has_first_step(out: Path) -> bool:
    """True once the metrics contain the first step."""
    return (out / "metrics.jsonl").is_file() and bool(records(out, "train"))


def interrupt(running: Running) -> Done:
    running.popen.send_signal(signal.SIGINT)
    done = running.finish()
    assert (done.code, done.err) == (130, "interrupted\n")
    assert wait_until(lambda: not running.processes(), within_s=240)
    return done


def test_listed_model_scripts_exist(place: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", block("list of models")], cwd=place, capture_output=True, text=True, check=True
    )
    named = re.findall(r"[\w.-]+\.sh", block("list of models").splitlines()[1])
    assert len(named) == 5
    assert set(named) <= set(done.stdout.split())


def test_quick_start_runs_as_typed(place: Path) -> None:
    """Four trainers, four engines, 3000 rollouts of 256 samples: interrupted by Ctrl-C after the first step."""
    command = typed(block("quick start"), place)
    with started(command, place, **TINY) as running:
        out = run_folder(running, place)
        assert out.parent == place / "outputs"
        wait_for(running, lambda: has_first_step(out))
        assert (len(running.processes("slime.train.worker")), len(running.processes("slime.engine.embedded"))) == (4, 4)
        interrupt(running)
    (first, *_) = records(out, "train")
    assert first["train/global_batch_size"] == 256
    assert "train/kl_loss" in first
    assert len(samples(out)) >= 256
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert events.Scalars("train/loss")[0].value == pytest.approx(first["train/loss"], rel=1e-5)


def test_grpo_command_runs_as_typed(place: Path) -> None:
    """Eight trainers and eight engines; a note names a flag without effect, and checkpoints go to the run's folder."""
    with started(typed(block("GRPO"), place), place, **TINY) as running:
        out = run_folder(running, place)
        wait_for(running, lambda: has_first_step(out))
        assert (len(running.processes("slime.train.worker")), len(running.processes("slime.engine.embedded"))) == (8, 8)
        done = interrupt(running)
    assert "--eval-interval 50" in done.out
    used = yaml.safe_load((out / "config.yaml").read_text())
    assert (used["save_interval"], place / used["save"]) == (100, out)
    assert len(samples(out)) >= 256


def test_grpo_run_from_bash_resumes_after_ctrl_c(place: Path) -> None:
    """Runs bash, python, train.py and its processes directly; Ctrl-C reaches all of them, as from a terminal."""
    smaller = "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-batch-size 2 --n-samples-per-prompt 2"
    command = block("GRPO").rstrip() + f" {smaller} --global-batch-size 4 --save-interval 1\n"
    shell = ["bash", "-c", f"python() {{ '{sys.executable}' \"$@\"; }}\n" + command.replace("/path/to", str(place))]
    with started(["setsid", "--wait", *shell], place, **TINY) as running:
        out = run_folder(running, place)
        wait_for(running, (out / "latest_checkpointed_iteration.txt").is_file)
        leader = next(pid for pid in running.processes("train.py") if os.getpgid(pid) != os.getpgid(0))
        os.killpg(os.getpgid(leader), signal.SIGINT)
        done = running.finish()
        assert (done.code, done.err) == (130, "interrupted\n")
        assert wait_until(lambda: not running.processes(), within_s=240)
    saved = int((out / "latest_checkpointed_iteration.txt").read_text())
    flags = ["--load", str(out), "--save", str(out), "--num-rollout", str(saved + 2)]
    again = run([*typed(command, place), *flags], place, **TINY)
    assert again.code == 0, again.err
    steps = [record["step"] for record in records(out, "train")]
    assert steps == list(range(saved + 2))


def test_asynchronous_command_runs(place: Path) -> None:
    command = typed(block("asynchronous"), place)
    as_typed = run(command, place, **TINY)
    assert as_typed.code == 0, as_typed.err
    assert "no --num-rollout and no --num-epoch: the run is one pass over the prompts" in as_typed.out
    assert "trainer: starting 8 process(es)" in as_typed.out
    assert "step 1/1 " in as_typed.out
    more = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "3", "--output-dir", "async"]
    done = run([*command, *ONE_EACH, *more, "--update-weights-interval", "2"], place, **TINY)
    assert done.code == 0, done.err
    used = yaml.safe_load((place / "async" / "config.yaml").read_text())
    assert (used["async_mode"], used["async_buffer_size"], used["update_weights_interval"]) == ("one-step", 4, 2)
    assert [record["step"] for record in records(place / "async", "train")] == [0, 1, 2]


def test_multi_turn_command_with_tools_runs(place: Path) -> None:
    command = typed(block("multi-turn"), place)
    as_typed = run([*command, "--input-key", "prompt"], place, **TINY)
    assert as_typed.code == 0, as_typed.err
    assert "step 1/1 " in as_typed.out
    done = run([*command, *ONE_EACH, *ONE_STEP, "--output-dir", "turns"], place, **TINY)
    assert done.code == 0, done.err
    found = samples(place / "turns")
    assert [(sample.response, sample.reward) for sample in found] == [("answer 4", float(i % 2)) for i in range(4)]
    assert all(sample.prompt[-1] == {"role": "tool", "content": "4"} for sample in found)


def test_shared_gpus_with_a_reward_model_and_two_evaluations(place: Path) -> None:
    """The command with the two fragments that follow it in the documents; a YAML file has the class's arguments."""
    (place / "reward.yaml").write_text("model_path: four\n")
    fragments = f"{block('custom reward').rstrip()} {block('evaluation')}"
    command = typed(block("shared GPUs").rstrip() + " " + fragments, place)
    more = ["--actor-num-gpus-per-node", "1", "--prompt-data", "data.jsonl", "--eval-interval", "1"]
    more += ["--custom-config-path", "reward.yaml"]
    done = run([*command, *ONE_STEP, *more, "--output-dir", "shared"], place, **TINY)
    assert done.code == 0, done.err
    found = samples(place / "shared")
    assert [sample.reward for sample in found] == [4.0 + len(sample.response) for sample in found]
    evaluations = records(place / "shared", "eval")
    assert [record["step"] for record in evaluations] == [0, 1]
    assert all({"eval/aime", "eval/gsm8k"} <= set(record) for record in evaluations)


def test_documented_data_source_supplies_the_prompts(place: Path) -> None:
    command = typed("python train.py ${MODEL_ARGS[@]}", place)
    flags = ["--data-source-path", "data_sources.RolloutDataSourceWithBuffer", "--rm-type", "math"]
    done = run([*command, *ONE_EACH, *ONE_STEP, *flags, "--output-dir", "sources"], place, **TINY)
    assert done.code == 0, done.err
    assert {(sample.prompt, sample.label) for sample in samples(place / "sources")} == {("What is 2 + 2?", "4")}


def fragments() -> list[str]:
    return block("parameters").splitlines()


@pytest.mark.parametrize("fragment", fragments())
def test_documented_parameter_reaches_config_and_plan(
    fragment: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parses and plans one command: the config has the value, and the plan names flags that are only carried."""
    words = shlex.split(fragment.replace("/path/to", str(place)))
    model = place / "of-this-shape"
    model.mkdir(exist_ok=True)
    layers, hidden = (32, 4096) if {"--num-layers", "--hidden-size"} & set(words) else (2, 64)
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 96, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 99, **shape}))
    add_weights(model)
    verb = "train-async" if "--async-buffer-size" in words else "train"
    base = ["--hf-checkpoint", str(model), "--prompt-data", str(place / "data.jsonl"), "--rollout-batch-size", "8"]
    base += ["--num-rollout", "1", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--device", "cpu"]
    needed = ["--normalize-advantages"] if "reinforce_plus_plus" in words else []
    command = [*base, *needed, "--output-dir", str(place / "planned"), *words]
    assert main([verb, *command, "--dry-run"]) == 0, capsys.readouterr().err
    plan = capsys.readouterr().out
    config = parse_args([*command, *(["--async-mode", "one-step"] if verb == "train-async" else [])])
    flags = [word for word in words if word.startswith("--")]
    for flag in flags:
        name = flag[2:].replace("-", "_")
        value = config.carried[name] if name in config.carried else getattr(config, name)
        following = words[words.index(flag) + 1 :]
        expected = following[0] if following and not following[0].startswith("--") else "True"
        assert str(value) == expected
        assert name not in config.carried or flag in plan
