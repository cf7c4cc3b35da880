"""Helpers of launch scripts, under upstream's import path.

Ray is not started and no process is killed: `execute_train` runs one `python train.py ...`, with the model's flags
first.

Invariant: the text of a command line or of variables is split into words and never executed. Quotes, backslashes and
`$NAME` mean the same as in a shell; no other syntax is interpreted. The value of a variable stays one word.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.errors import UserError

_QUOTED = re.compile(r'"[^"]*"|\'[^\']*\'')
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_KEPT = "\0"
_SECRETS = ("--wandb-key",)
repo_base_dir = Path(__file__).resolve().parents[4]
"""The checkout that contains train.py, scripts/ and tools/."""


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return True if an environment variable is true, 1, yes or on."""
    return os.environ.get(name, default).strip().lower() in ("true", "1", "yes", "on")


@dataclass
class ExecuteTrainConfig:
    """The options that a launch script offers its user."""

    cuda_core_dump: bool = False
    num_nodes: int = field(default_factory=lambda: int(os.environ.get("SLIME_SCRIPT_NUM_NODES", "1")))
    extra_env_vars: str = ""
    """JSON, or `A=1 B=2`."""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], Any] | None = None,
    extra_env_vars: Mapping[str, Any] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Run a training script to its end; raises `subprocess.CalledProcessError` if it fails.

    `train_args` is a command line, parsed like a shell but without one. `megatron_model_type` names the file of
    scripts/models/ whose MODEL_ARGS come first. The number of GPUs is detected, not taken from the argument.
    """
    config = config or ExecuteTrainConfig()
    if config.num_nodes > 1:
        raise UserError(f"execute_train with num_nodes {config.num_nodes}: a run is on one machine in this version")
    env = {**os.environ, **(_CORE_DUMP if config.cuda_core_dump else {})}
    env |= {name: str(value) for name, value in (extra_env_vars or {}).items()} | parsed_env(config.extra_env_vars)
    shape = []
    if megatron_model_type is not None:
        shape = model_args(repo_base_dir / "scripts" / "models" / f"{megatron_model_type}.sh", env)
    command = [sys.executable, str(_script(train_script)), *shape, *words_of(train_args, env)]
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    print(f"EXEC: {shown(command)}", flush=True)
    subprocess.run(command, env=env, check=True)


_CORE_DUMP = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    "CUDA_COREDUMP_FILE": str(Path(tempfile.gettempdir()) / "cuda_coredump_%h.%p.%t"),
}


def _script(name: str) -> Path:
    """Resolve a user's path, else a script of the checkout."""
    for path in (Path(name), repo_base_dir / name):
        if path.is_file():
            return path.resolve()
    raise UserError(f"execute_train: there is no {name}, neither here nor in {repo_base_dir}")


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a bash command line to its end; return its output if captured."""
    print(f"EXEC: {cmd}", flush=True)
    done = subprocess.run(
        ["bash", "-c", cmd], check=True, stdout=subprocess.PIPE if capture_output else None, text=True
    )
    return done.stdout if capture_output else None


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = "/root/models",
    hf_checkpoint: str | None = None,
) -> None:
    """Make `<dir_dst>/<model_name>_torch_dist` a link to the model's folder, which runs read without conversion."""
    source = Path(hf_checkpoint or f"/root/models/{model_name}")
    target = Path(dir_dst) / f"{model_name}_torch_dist"
    if target.exists():
        print(f"convert_checkpoint: {target} is there already", flush=True)
        return
    if not (source / "config.json").is_file():
        raise UserError(f"convert_checkpoint: {source} is not a Hugging Face folder (it has no config.json): name one")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source.resolve(), target_is_directory=True)
    print(f"convert_checkpoint: nothing has to be converted; {target} is a link to {source}", flush=True)


def hf_download_dataset(full_name: str, data_dir: str = "/root/datasets") -> None:
    """Download a data set of the Hugging Face hub to `<data_dir>/<its last name>`."""
    from huggingface_hub import snapshot_download

    snapshot_download(full_name, repo_type="dataset", local_dir=str(Path(data_dir) / full_name.rpartition("/")[2]))


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Copy the contents of one folder into another; with rsync, only differing files."""
    Path(path_dst).mkdir(parents=True, exist_ok=True)
    if shutil.which("rsync") is not None:
        subprocess.run(["rsync", "-a", f"{path_src}/", f"{path_dst}/"], check=True)
    else:
        shutil.copytree(path_src, path_dst, symlinks=True, dirs_exist_ok=True)


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Return flags that report to W&B under the script's name if WANDB_API_KEY is set; the run reads the key there."""
    if not os.environ.get("WANDB_API_KEY"):
        print("WANDB_API_KEY is not set: nothing is reported to W&B", flush=True)
        return ""
    file = Path(test_file)
    name = file.stem if len(file.stem) >= 6 else f"{file.parent.name}_{file.stem}"
    parts = (run_name_prefix, run_id or create_run_id(), os.environ.get("GITHUB_COMMIT_NAME"))
    group = "_".join(part for part in parts if part)
    return f"--use-wandb --wandb-project slime-{name} --wandb-group {group} --disable-wandb-random-suffix "


def create_run_id() -> str:
    """Return the UTC time with three random digits, for several starts in one second: 250131-235959-042."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%y%m%d-%H%M%S}-{random.randint(0, 999):03d}"


def save_to_temp_file(text: str, ext: str) -> str:
    """Write a new file with this text and return its path; the file is not removed."""
    with tempfile.NamedTemporaryFile("w", prefix="slime_", suffix=f".{ext}", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name


def words_of(text: str, env: Mapping[str, str]) -> list[str]:
    """Split a command line into words; `$NAME` and `${NAME}` come from `env` unless they are in single quotes."""
    joined = text.replace("\\\n", " ")
    kept = _QUOTED.sub(lambda quoted: quoted[0].replace("$", _KEPT) if quoted[0][0] == "'" else quoted[0], joined)
    try:
        words = shlex.split(kept, comments=True)
    except ValueError as error:
        raise UserError(f"the command line {text.strip()[:80]!r} cannot be read ({error}): close its quotes") from error
    expanded = [_VARIABLE.sub(lambda found: env.get(found[1] or found[2], ""), word) for word in words]
    return [word.replace(_KEPT, "$") for word in expanded]


def shown(words: Sequence[str]) -> str:
    """Format a command for printing, with secrets hidden."""
    hidden = ["..." if before in _SECRETS else word for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(hidden)


def model_args(script: Path, env: Mapping[str, str]) -> list[str]:
    """Run a model script (`scripts/models/*.sh`) and return the array MODEL_ARGS that it sets."""
    if not script.is_file():
        others = sorted(path.stem for path in script.parent.glob("*.sh") if path.stem != "lib")
        known = f": choose one of {', '.join(others)}" if others else ": it belongs to a checkout of slime"
        raise UserError(f"there is no model script {script}{known}")
    command = 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", command, "bash", str(script)], env=dict(env), capture_output=True)
    if done.returncode != 0:
        raise UserError(f"{script} failed: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout).split("\0")[:-1]


def parsed_env(text: str) -> dict[str, str]:
    """Parse variables written as JSON, or as `A=1 B=2`."""
    text = text.strip()
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UserError(f"the variables {text[:80]!r} are not valid JSON ({error})") from error
        return {str(name): str(value) for name, value in found.items()}
    pairs = [word.partition("=") for word in shlex.split(text)]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UserError(f"the variables {text[:80]!r}: {wrong[0]} has no value: write NAME=value")
    return {name: value for name, _, value in pairs}
