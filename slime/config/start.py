"""Where the weights of a run come from: `--load`, read by what lies in it, else `--hf-checkpoint`.

Invariant: every folder that a run reads weights from is looked at before anything starts, as the kind of folder that
it is: a model folder, or a checkpoint with whole files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slime.config.algorithm import has_critic
from slime.config.config import Config
from slime.config.model_folder import check_model_folder
from slime.config.roles import critic_flags
from slime.config.weight_files import read_header
from slime.errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
_META = "meta.json"
_MEGATRON = ("*.distcp", "mp_rank_*", "common.pt")


@dataclass(frozen=True)
class Start:
    """A checkpoint, another model folder, or (both None) `--hf-checkpoint`."""

    checkpoint: Path | None = None
    hf_folder: Path | None = None


def find_start(config: Config) -> Start:
    """Read `--load`: a folder of checkpoints, one checkpoint, a Hugging Face folder, or a run still to be begun."""
    if config.load is None:
        return Start()
    folder = Path(config.load)
    latest = folder / LATEST
    if latest.is_file():
        text = latest.read_text().strip()
        chosen = folder / f"iter_{int(text):07d}" if text.isdigit() else None
        if chosen is not None and _is_megatron(chosen):
            raise UserError(
                f"--load {folder} holds a Megatron checkpoint, which this version does not read: convert it to a "
                "Hugging Face folder"
            )
        if chosen is None or not (chosen / _META).is_file():
            raise UserError(f"{latest} names iteration {text!r}, which is not there: choose another --load")
        return Start(checkpoint=chosen)
    if (folder / _META).is_file():
        return Start(checkpoint=folder)
    if (folder / "config.json").is_file():
        return Start(hf_folder=folder)
    if config.save is not None and folder.absolute() == Path(config.save).absolute():
        return Start()
    raise UserError(f"--load {folder} holds neither a checkpoint ({LATEST}) nor a Hugging Face model (config.json)")


def find_critic_start(config: Config) -> Start:
    """Where the critic starts: from its checkpoint of the rollout that the policy's is of, whatever it saved since.

    A run that ended between the two checkpoints of a rollout leaves the critic's without the policy's.
    """
    critic = critic_flags(config)
    if critic.load is None:
        return Start()
    policy = find_start(config).checkpoint
    if policy is not None and (Path(critic.load) / policy.name / _META).is_file():
        return Start(checkpoint=Path(critic.load) / policy.name)
    start = find_start(critic)
    if policy is None and start.checkpoint is not None and continues_itself(critic):
        return Start()
    return start


def model_folders(config: Config) -> dict[str, str]:
    """Every model folder that a run loads, under the flag that names it; one that two flags name only once."""
    found = {"--hf-checkpoint": config.hf_checkpoint}
    given = {"--opd-teacher-load": config.opd_teacher_load, "--ref-load": config.ref_load}
    if not config.debug_rollout_only:
        given["--load"] = _hf_folder(config)
    if has_critic(config):
        critic = critic_flags(config)
        given |= {"--critic-hf-checkpoint": critic.hf_checkpoint, "--critic-load": _hf_folder(critic)}
    for flag, folder in given.items():
        if folder is not None and folder not in found.values():
            found[flag] = folder
    return found


def _hf_folder(config: Config) -> str | None:
    if config.load is None or not Path(config.load).is_dir():
        return None
    folder = find_start(config).hf_folder
    return None if folder is None else str(folder)


def resumes_at(config: Config) -> int:
    """The first rollout that a run with this `--load` has still to do; 0 when nothing was trained there."""
    checkpoint = find_start(config).checkpoint
    if checkpoint is None:
        return 0
    try:
        return int(json.loads((checkpoint / _META).read_text())["next_rollout_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / _META} cannot be read ({error}): the checkpoint is damaged") from error


def continues_itself(config: Config) -> bool:
    """Whether the same command, given again, goes on from its own last checkpoint."""
    if config.load is None or config.save is None:
        return False
    return Path(config.load).absolute() == Path(config.save).absolute()


def check_weight_sources(config: Config) -> None:
    """Raise a `UserError` for the first folder that the engines or trainers of this run could not load."""
    served_elsewhere = config.rollout_external_engine_addrs or config.carried.get("sglang_load_format") == "dummy"
    only_described = config.debug_rollout_only and bool(served_elsewhere)
    for flag, folder in model_folders(config).items():
        check_model_folder(folder, flag, weights=not only_described)
    _check_start(config, "--load", lambda: find_start(config))
    if has_critic(config):
        _check_critic_load(config)
        _check_start(critic_flags(config), "--critic-load", lambda: find_critic_start(config))


def _check_critic_load(config: Config) -> None:
    """Only a folder that follows from --load or --save may still have to be made."""
    load = config.critic_load
    if load is None or Path(load).is_dir() or load == config.critic_save:
        return
    if config.load is None or Path(load) != Path(config.load) / "critic":
        raise UserError(f"--critic-load: there is no folder {load}")


def _check_start(config: Config, flag: str, find: Callable[[], Start]) -> None:
    if config.load is None or config.debug_rollout_only:
        return
    if not Path(config.load).is_dir():
        if config.save is not None and Path(config.load).absolute() == Path(config.save).absolute():
            return  # the first start of a run that resumes from its own checkpoints
        raise UserError(f"{flag}: there is no folder {config.load}")
    start = find()
    if start.checkpoint is not None:
        check_checkpoint(start.checkpoint, flag)


def check_checkpoint(checkpoint: Path, flag: str) -> None:
    """Raise a `UserError` unless the weight files of a checkpoint are there and whole."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if not any(file.name.startswith("model-") for file in files):
        raise UserError(f"{flag}: checkpoint {checkpoint} has no weights (model-*.safetensors): choose another one")
    for file in files:
        read_header(file, flag)


def _is_megatron(folder: Path) -> bool:
    return folder.is_dir() and any(any(folder.glob(pattern)) for pattern in _MEGATRON)
