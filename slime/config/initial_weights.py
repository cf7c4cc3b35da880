"""Initial weights of a run: a checkpoint or model at `--load`, else `--ref-load`, else `--hf-checkpoint`.

Invariant: every folder that a run reads weights from is checked before anything starts: it is a model folder, or a
checkpoint with complete files. Config and tokenizer are always those of `--hf-checkpoint`, so the policy's weights
must have the shape of that model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slime.config.algorithm import has_critic, needs_reference
from slime.config.config import Config
from slime.config.critic import critic_flags
from slime.config.model_folder import (
    LATEST,
    check_model_folder,
    check_same_shape,
    find_readable_megatron,
    read_header,
    read_latest,
)
from slime.errors import UserError
from slime.storage.json_types import JsonObject

_META = "meta.json"
Meta = TypeVar("Meta")


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights: a checkpoint, another model folder, Megatron's weights, or (all None) `--hf-checkpoint`.

    `flag` names the source.
    """

    checkpoint: Path | None = None
    hf_folder: Path | None = None
    flag: str = "--hf-checkpoint"
    megatron: Path | None = None
    """A torch_dist checkpoint, of which only weights are read."""

    @property
    def folder(self) -> Path | None:
        """Return the folder that is read; None for `--hf-checkpoint`."""
        return self.checkpoint or self.hf_folder or self.megatron

    @property
    def resumes(self) -> bool:
        """Return whether optimizer, counters and random state are also restored; `--ref-load` gives only weights."""
        return self.checkpoint is not None and self.flag != "--ref-load"


def split_load_iteration(config: Config) -> Config:
    """Replace a `--load` of one `iter_<n>` in a folder of checkpoints by that folder with `--ckpt-step <n>`.

    The data position, the rollouts not yet trained on and the critic's checkpoints are next to the iteration.
    """
    one = None if config.load is None or config.ckpt_step is not None else Path(config.load)
    number = None if one is None else re.fullmatch(r"iter_(\d+)", one.name)
    if one is None or number is None or not (one / _META).is_file() or read_latest(one.parent) is None:
        return config
    return config.replace(load=str(one.parent), ckpt_step=int(number[1]))


def find_initial_weights(config: Config, flag: str = "--load") -> InitialWeights:
    """Return the initial weights of the policy: those at `--load`, or those of the reference if there are none."""
    if config.load is None:
        return find_reference_weights(config)
    found = _read_folder(config.load, flag, config.ckpt_step)
    return find_reference_weights(config) if found is None else found


def find_reference_weights(config: Config) -> InitialWeights:
    """Return the weights of the reference, which also are the initial weights of a policy without checkpoint."""
    if config.ref_load is None:
        return InitialWeights()
    found = _read_folder(config.ref_load, "--ref-load", config.ref_ckpt_step)
    return InitialWeights(hf_folder=Path(config.ref_load), flag="--ref-load") if found is None else found


def _read_folder(folder: str, flag: str, step: int | None) -> InitialWeights | None:
    """Find a folder of checkpoints, one checkpoint, or a Hugging Face folder; None if `folder` is none of these."""
    path = Path(folder)
    megatron = find_readable_megatron(path, f"{flag} {folder}", step)
    if megatron is not None:
        return InitialWeights(megatron=megatron, flag=flag)
    text = read_latest(path)
    if text is not None:
        number = step if step is not None else int(text) if text.isdecimal() else None
        chosen = None if number is None else iteration(path, number)
        if chosen is None:
            named = f"{flag} {folder} has no iteration {step}"
            if step is None:
                named = f"{path / LATEST} names iteration {text!r}, which does not exist"
            raise UserError(f"{named}: choose another {flag if step is None else 'one'}")
        return InitialWeights(checkpoint=chosen, flag=flag)
    if step is not None and path.is_dir():
        raise UserError(f"{flag} {folder} is not a folder of checkpoints to pick iteration {step} from: drop the step")
    if (path / _META).is_file():
        return InitialWeights(checkpoint=path, flag=flag)
    if (path / "config.json").is_file():
        return InitialWeights(hf_folder=path, flag=flag)
    return None


def adapter_base_weights(config: Config, start: InitialWeights) -> InitialWeights:
    """Return the frozen base weights of an adapter; a checkpoint that the run resumes from names them."""
    if not start.resumes or start.checkpoint is None:
        return start
    named = Path(str((read_checkpoint_adapter(start.checkpoint) or {}).get("base")))
    reference = find_reference_weights(config)
    if named == adapter_base_path(config, reference) or not named.is_dir():
        return reference
    found = _read_folder(str(named), "--ref-load", None)
    return reference if found is None else found


def adapter_base_path(config: Config, base: InitialWeights) -> Path:
    """Return the folder that a checkpoint of an adapter names as its base."""
    return Path(base.folder or config.hf_checkpoint).resolve()


def _from_meta(checkpoint: Path, read: Callable[[JsonObject], Meta]) -> Meta:
    """Return what `read` takes from the metadata of a checkpoint; raise a `UserError` if that fails."""
    try:
        return read(json.loads((checkpoint / _META).read_text()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{checkpoint / _META} cannot be read ({error}): the checkpoint is damaged") from error


def read_checkpoint_adapter(checkpoint: Path) -> JsonObject | None:
    """Read rank, alpha, targets and base of a checkpoint's adapter; None if the checkpoint has all weights."""
    found = _from_meta(checkpoint, lambda meta: meta.get("lora"))
    return found if isinstance(found, dict) else None


def iteration(root: Path, number: int) -> Path | None:
    """Find the checkpoint with a number, also under the backup name left by a run killed while replacing it."""
    folder = root / f"iter_{number:07d}"
    found = [folder, *sorted(root.glob(f".{folder.name}.old-*"))]
    return next((path for path in found if (path / _META).is_file()), None)


def find_critic_weights(config: Config) -> InitialWeights:
    """Return the initial weights of the critic: its checkpoint of the same rollout as the policy's.

    Later checkpoints of the critic are ignored: a run that ends between the two checkpoints of a rollout leaves the
    critic's without the policy's.
    """
    critic = critic_flags(config)
    if critic.load is None:
        return find_reference_weights(critic)
    start = find_initial_weights(config)
    policy = start.checkpoint if start.resumes else None
    number = None if policy is None else re.search(r"iter_(\d+)", policy.name)
    pair = None if number is None else iteration(Path(critic.load), int(number[1]))
    if pair is not None:
        return InitialWeights(checkpoint=pair, flag="--critic-load")
    start = find_initial_weights(critic, "--critic-load")
    if policy is None and start.resumes and resumes_own_checkpoints(critic):
        return find_reference_weights(critic)
    return start


def reads_reference(config: Config) -> bool:
    """Return whether `--ref-load` is read: for the reference, or as initial weights of policy or critic."""
    if config.ref_load is None or config.debug_rollout_only:
        return False
    return needs_reference(config) or not _load_has_weights(config) or _critic_reads_reference(config)


def _critic_reads_reference(config: Config) -> bool:
    critic = critic_flags(config) if has_critic(config) else None
    return critic is not None and critic.ref_load is not None and not _load_has_weights(critic)


def _load_has_weights(config: Config) -> bool:
    return config.load is not None and _read_folder(config.load, "--load", config.ckpt_step) is not None


def describe_initial_weights(config: Config) -> str:
    """Describe the initial weights of the policy: the flag and its folder."""
    start = find_initial_weights(config)
    only_weights = start.megatron is not None or (start.checkpoint is not None and not start.resumes)
    return f"{start.flag} {start.folder or config.hf_checkpoint}" + (", weights only" if only_weights else "")


def describe_reference(config: Config) -> str:
    """Describe the weights of the reference: the flag and its folder."""
    reference = find_reference_weights(config)
    return f"{reference.flag} {reference.folder or config.hf_checkpoint}"


def initial_weight_notes(config: Config) -> Iterator[str]:
    """Yield notes about `--load` and `--ref-load` whose effect may be unexpected."""
    if config.debug_rollout_only:
        return
    begins = f"the actor starts from {describe_initial_weights(config)}"
    if config.load is not None:
        if not _load_has_weights(config):
            if not resumes_own_checkpoints(config):
                yield f"--load {config.load} has no checkpoint: {begins}"
        elif find_initial_weights(config).megatron is not None:
            yield (
                f"--load {config.load} is a Megatron checkpoint: only its weights are read; the optimizer starts fresh "
                "and rollouts count from 0"
            )
    if config.ref_load is not None and not reads_reference(config):
        yield f"--ref-load {config.ref_load} is not read: {begins}, and without --use-kl-loss there is no reference"


def model_folders(config: Config) -> dict[str, str]:
    """Return flag and path of every model folder that a run loads; a folder that two flags name appears once."""
    given: dict[str, str | InitialWeights | None] = {
        "--hf-checkpoint": config.hf_checkpoint,
        "--opd-teacher-load": config.opd_teacher_load,
    }
    if reads_reference(config):
        given["--ref-load"] = find_reference_weights(config)
    if config.load is not None and not config.debug_rollout_only:
        given["--load"] = find_initial_weights(config)
    if has_critic(config):
        critic = critic_flags(config)
        given["--critic-hf-checkpoint"] = critic.hf_checkpoint
        if critic.load is not None:
            given["--critic-load"] = find_critic_weights(config)
    found: dict[str, str] = {}
    for flag, source in given.items():
        folder = source.hf_folder if isinstance(source, InitialWeights) else source
        if folder is not None and str(folder) not in found.values():
            found[flag] = str(folder)
    return found


def first_rollout_id(config: Config) -> int:
    """Return the first rollout of a run with this `--load`; 0 if it does not resume."""
    start = find_initial_weights(config)
    if start.checkpoint is None or not start.resumes:
        return 0
    return _from_meta(start.checkpoint, lambda meta: int(meta["next_rollout_id"]))


def resumes_own_checkpoints(config: Config) -> bool:
    """Return whether the same command, run again, resumes from its own last checkpoint."""
    if config.load is None or config.save is None:
        return False
    return Path(config.load).absolute() == Path(config.save).absolute()


def check_weight_sources(config: Config) -> None:
    """Raise a `UserError` for the first folder that the engines or trainers of this run could not load."""
    served_elsewhere = config.rollout_external_engine_addrs or config.carried.get("sglang_load_format") == "dummy"
    only_described = (config.debug_rollout_only and bool(served_elsewhere)) or config.plan_cluster is not None
    for step, flag, folder in (
        (config.ckpt_step, "--load", config.load),
        (config.ref_ckpt_step, "--ref-load", config.ref_load),
    ):
        if step is not None and folder is None:
            named = "--ckpt-step" if flag == "--load" else "--ref-ckpt-step"
            raise UserError(f"{named} {step} selects a checkpoint of {flag}: give {flag}, or drop {named}")
    for flag, folder in model_folders(config).items():
        check_model_folder(folder, flag, weights=not only_described)
    if config.debug_rollout_only:
        return
    _check_initial_weights(config, find_initial_weights(config))
    if reads_reference(config):
        _check_reference(config)
    if has_critic(config):
        load = config.critic_load
        if (  # only a folder that follows from --load or --save may be missing
            load is not None
            and not Path(load).is_dir()
            and load != config.critic_save
            and (config.load is None or Path(load) != Path(config.load) / "critic")
        ):
            raise UserError(f"--critic-load: there is no folder {load}")
        _check_initial_weights(critic_flags(config), find_critic_weights(config))


def _check_reference(config: Config) -> None:
    """Check the reference: a checkpoint must be complete; a model folder may differ in shape, but not in vocabulary."""
    reference = find_reference_weights(config)
    if reference.checkpoint is not None:
        check_checkpoint(reference.checkpoint, "--ref-load")
        if read_checkpoint_adapter(reference.checkpoint) is not None:
            raise UserError(
                f"--ref-load {reference.checkpoint} holds an adapter, not all weights: convert it with slime convert"
            )
        if has_critic(config) and _critic_reads_reference(config):
            raise UserError(
                f"--ref-load {config.ref_load} is a checkpoint of a policy, which a critic cannot start from: give "
                "--critic-hf-checkpoint"
            )
    elif reference.hf_folder is not None:
        check_same_shape(reference.hf_folder, "--ref-load", config.hf_checkpoint, only=("vocab_size",))


def _check_initial_weights(config: Config, start: InitialWeights) -> None:
    if config.load is not None and Path(config.load).is_file():
        raise UserError(f"--load {config.load} is a file, but a folder is needed")
    if start.checkpoint is not None:
        check_checkpoint(start.checkpoint, start.flag)
        if start.resumes:
            _check_same_adapter(config, start)
    elif start.hf_folder is not None:
        check_same_shape(start.hf_folder, start.flag, config.hf_checkpoint)


def _check_same_adapter(config: Config, start: InitialWeights) -> None:
    """Check that LoRA resumes from a checkpoint of the same adapter, and full training from one of all weights."""
    assert start.checkpoint is not None
    saved, flag = read_checkpoint_adapter(start.checkpoint), f"{start.flag} {start.checkpoint}"
    if saved is None and config.lora_rank:
        raise UserError(
            f"{flag} holds all weights and no adapter: give it as --ref-load to train an adapter on them, or drop "
            "--lora-rank"
        )
    if saved is None:
        return
    theirs = f"--lora-rank {saved.get('rank')} --lora-alpha {saved.get('alpha'):g}"
    theirs += f" --lora-target-modules {' '.join(saved.get('targets') or ())}"
    if not config.lora_rank:
        raise UserError(f"{flag} holds an adapter, not all weights: add {theirs}, or convert it with slime convert")
    ours = (config.lora_rank, config.lora_alpha, sorted(config.lora_target_modules or ()))
    if ours != (saved.get("rank"), saved.get("alpha"), sorted(saved.get("targets") or ())):
        raise UserError(f"{flag} holds another adapter than the flags describe: resume with {theirs}")


def check_checkpoint(checkpoint: Path, flag: str) -> None:
    """Raise a `UserError` unless all weight files of a checkpoint exist and are complete."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if not any(file.name.startswith("model-") for file in files):
        raise UserError(f"{flag}: checkpoint {checkpoint} has no weights (model-*.safetensors): choose another one")
    for file in files:
        read_header(file, flag)
    # checkpoints of the first format do not name their files
    named_files = _from_meta(checkpoint, lambda meta: set(meta.get("files", ())))
    missing = sorted(named_files - {file.name for file in files})
    if missing:
        named = f"{len(missing)} of its files, {missing[0]} first"
        raise UserError(f"{flag}: checkpoint {checkpoint} lacks {named}: choose another one")
