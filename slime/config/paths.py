"""Checks, before anything starts, that a run overwrites no foreign files and can write to its folders.

Invariant: nothing is written into a model folder that is read. A folder that is replaced as a whole (`--save-hf`, the
local copy for deltas) contains nothing that no run wrote. Existing files under a name that the run will write carry the
mark of a run (`slime.storage.files`). Write access is tested with a probe file: permissions alone do not account for
read-only mounts, full disks and root.

`RolloutPath` is a path of which a run writes one per rollout: its placeholder `{rollout_id}` is filled in.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from slime.config.config import RESOLVED, Config
from slime.config.datasets import all_datasets
from slime.config.fields import flag_name
from slime.config.model_folder import LATEST
from slime.errors import UserError
from slime.storage.files import find_foreign_file, is_checkpoint, is_dump, is_marked


@dataclass(frozen=True)
class RolloutPath:
    """A path with or without the placeholder; links in the part before it are followed.

    `named` is a prefix of the number that the placeholder may also be replaced by.
    """

    template: str
    named: str = ""

    @property
    def is_one(self) -> bool:
        """Return whether the path is the same for every rollout."""
        return all(field is None for _, field, _, _ in Formatter().parse(self.template))

    @property
    def real(self) -> str:
        """Return the template as an absolute path, with links resolved up to the part with the placeholder."""
        fixed, rest = self._split()
        return os.path.join(os.path.realpath(fixed), rest) if rest else os.path.realpath(fixed)

    @property
    def fixed_folder(self) -> Path:
        """Return the folder that contains all of these paths."""
        fixed, rest = self._split()
        real = Path(os.path.realpath(fixed))
        return real if rest else real.parent

    def rollout_of(self, path: Path) -> int | None:
        """Return the rollout that `path` belongs to, None for other paths; 0 if all rollouts share the path."""
        fixed, rest = self._split()
        folder = os.path.realpath(fixed)
        if not rest:
            return 0 if str(path) == folder else None
        inner = os.path.relpath(path, folder)
        for number in re.findall(r"\d+", inner):
            for word in (int(number), f"{self.named}{int(number)}"):
                try:
                    filled = rest.format(rollout_id=word)
                except ValueError:  # a format for numbers only
                    continue
                if filled == inner:
                    return int(number)
        return None

    def present(self) -> Iterator[tuple[int, Path]]:
        """Yield the existing paths with their rollouts."""
        fixed, rest = self._split()
        names = "".join(glob.escape(text) + "*" * (field is not None) for text, field, _, _ in Formatter().parse(rest))
        pattern = os.path.join(glob.escape(os.path.realpath(fixed)), names) if rest else glob.escape(self.real)
        for name in glob.glob(pattern):
            rollout_id = self.rollout_of(Path(name))
            if rollout_id is not None:
                yield rollout_id, Path(name)

    def existing_folders(self) -> Iterator[Path]:
        """Yield the existing paths, and the existing folders on them from the first placeholder on."""
        for template in (self.template, *map(str, Path(self.template).parents)):
            path = RolloutPath(template)
            if not path.is_one or template == self.template:
                yield from (Path(os.path.realpath(found)) for _, found in path.present())

    def _split(self) -> tuple[str, str]:
        """Split into the folders before the first part with the placeholder, and the rest (may be empty)."""
        parts = Path(os.path.abspath(self.template)).parts
        first = next((i for i, part in enumerate(parts) if not RolloutPath(part).is_one), len(parts))
        before = "".join(text for text, _, _, _ in Formatter().parse(os.path.join(*parts[:first])))
        return before, os.path.join(*parts[first:]) if first < len(parts) else ""


LOCAL_FILES = ".weight_sync/files.json"
"""Lists the files of a local weight copy that deltas are applied to."""
_PROBE_BYTES = 4096
_RUN_FILES = ("metrics.jsonl", "completions.jsonl", "reward.png", "loss.png")
_RUN_LOCK = ".lock"


@dataclass(frozen=True)
class FlaggedPath:
    """A path and the flag that names it; `is_replaced`: all old content of the folder is removed."""

    flag: str
    path: str
    is_replaced: bool = False

    @property
    def real(self) -> Path:
        return Path(os.path.realpath(self.path))

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"


def check_folders(config: Config) -> None:
    """Raise a `UserError` for paths where the run would overwrite foreign files, or that it cannot write."""
    for sentence in _collisions(config):
        raise UserError(sentence)
    for sentence in _foreign_file_conflicts(config):
        raise UserError(sentence)
    for flag, name in (
        ("--tb-project-name", config.tb_project_name),
        ("--tb-experiment-name", config.tb_experiment_name),
    ):
        if name is not None and (Path(name).is_absolute() or ".." in Path(name).parts):
            raise UserError(f"{flag} {name} is outside the run folder: give the name of a folder in it")
    for place in _written_paths(config):
        _check_writable(place)


def _flagged(config: Config, *names: str, is_replaced: bool = False) -> list[FlaggedPath]:
    """Return the given ones of these paths; only the folder of a path that names files of rollouts."""
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return [
        FlaggedPath(flag_name(name), str(Path(path).parent) if "_debug_" in name else path, is_replaced)
        for name, path in given.items()
    ]


def _data_paths_read(config: Config) -> list[FlaggedPath]:
    files = [FlaggedPath(dataset.origin, dataset.path) for dataset in all_datasets(config)]
    files = _flagged(config, "prompt_data") + files + _flagged(config, "load", "critic_load", "prompt_config")
    files += _flagged(config, "eval_config", "critic_config", "megatron_config_path")
    files = [FlaggedPath(place.flag, place.path.partition("@[")[0]) for place in files]
    return files + _flagged(config, "load_debug_rollout_data")


def _written_paths(config: Config) -> list[FlaggedPath]:
    return (
        _flagged(config, "output_dir", "save", "critic_save")
        + _flagged(config, "save_hf", is_replaced=True)
        + _flagged(config, "update_weight_disk_dir")
        + _flagged(config, "update_weight_local_checkpoint_dir", is_replaced=True)
        + _flagged(config, "save_debug_rollout_data", "save_debug_train_data")
    )


def _collisions(config: Config) -> Iterator[str]:
    models = _flagged(config, "hf_checkpoint", "critic_hf_checkpoint", "ref_load", "opd_teacher_load")
    models += [  # without folders to which a run may add checkpoints
        place
        for place in _flagged(config, "load", "critic_load")
        if not Path(place.path, LATEST).is_file()
        and any(Path(place.path, name).is_file() for name in ("config.json", "meta.json", ".metadata"))
    ]
    others, written = _data_paths_read(config), _written_paths(config)
    for place in written:
        if not place.is_replaced:
            if not place.flag.startswith("--save-debug"):  # single files, which are checked one by one
                taken = [model for model in models if place.real == model.real]
                yield from (_into_model(place, model) for model in taken)
            continue
        path = RolloutPath(place.path)
        reached = [path.fixed_folder, *path.existing_folders()]
        for model in models:
            if path.rollout_of(model.real) is not None or any(_is_within(one, model.real) for one in reached):
                yield _into_model(place, model)
        linked = {Path(os.path.realpath(found)) for _, found in path.present()}
        for other in [*models, *others, *(one for one in written if one.flag != place.flag)]:
            inner = RolloutPath(other.path)
            folder = Path(inner.real) if inner.is_one else inner.fixed_folder
            if any(path.rollout_of(one) is not None or one in linked for one in (folder, *folder.parents)):
                yield f"{place} is replaced as a whole, and {other} with it: choose another folder"
    checkpoints = [os.path.realpath(path) for path in (config.save, config.critic_save) if path is not None]
    if len(checkpoints) > len(set(checkpoints)):
        yield f"--critic-save and --save are both {config.save}: their checkpoints would overwrite each other"
    writes_versions = config.update_weight_transport == "disk" or config.update_weight_mode == "delta"
    for model in models if writes_versions else ():
        if model.real.parent == _version_root(config) and model.real.name.startswith("weight_v"):
            yield f"{model} is among the versions of the weights that this run removes: copy it elsewhere first"


def _into_model(place: FlaggedPath, model: FlaggedPath) -> str:
    return f"{place} would write into the model folder that {model} reads: choose another folder"


def _is_within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _foreign_file_conflicts(config: Config) -> Iterator[str]:
    # exports and checkpoints
    if config.save_hf is not None:
        for rollout_id, exported in RolloutPath(config.save_hf).present():
            if config.num_rollout is not None and rollout_id > config.num_rollout:
                continue
            if not exported.is_dir():
                yield f"--save-hf {config.save_hf} is a file, but a folder is needed: {exported}"
            elif (name := find_foreign_file(Path(os.path.realpath(exported)))) is not None:
                yield (
                    f"--save-hf {config.save_hf} would replace {exported}, which holds what no run saved ({name}): "
                    "choose another folder, or move that away"
                )
    local = config.update_weight_local_checkpoint_dir
    has_files = local is not None and Path(local).is_dir() and any(Path(local).iterdir())
    if local is not None and has_files and not Path(local, LOCAL_FILES).is_file():
        yield f"--update-weight-local-checkpoint-dir {local} holds files that no run wrote: name an empty folder"
    for flag, folder, load in (("--save", config.save, config.load), ("--critic-save", config.critic_save, None)):
        if folder is None or not Path(folder).is_dir():
            continue
        found = sorted(path for path in Path(folder).glob("iter_*") if path.name[5:].isdigit())
        strange = next((path for path in found if not is_checkpoint(path)), None)
        if strange is not None:
            yield (
                f"{flag} {folder} has a checkpoint that this slime did not write, or to which files were added "
                f"({strange.name}): choose another folder"
            )
        continues = load is not None and _is_within(Path(os.path.realpath(load)), Path(os.path.realpath(folder)))
        if flag == "--save" and found and not continues and not config.debug_rollout_only:
            yield (
                f"--save {folder} holds the checkpoints of an earlier run (up to {found[-1].name}), which this one "
                f"would overwrite: add --load {folder} to resume from them, or choose another folder"
            )
    # versions of the weights, and dumps
    for version in sorted(_version_root(config).glob("weight_v*")):
        if version.name[8:].isdigit() and not is_marked(version):
            yield (
                f"{version} is named like a version of the weights, but no run wrote it: choose another "
                "--update-weight-disk-dir, or move it away"
            )
    read = {place.real: place for place in _data_paths_read(config)}
    for flag, template in (
        ("--save-debug-rollout-data", config.save_debug_rollout_data),
        ("--save-debug-train-data", config.save_debug_train_data),
    ):
        if template is None:
            continue
        loaded = config.load_debug_rollout_data
        if loaded is not None and os.path.realpath(loaded) == os.path.realpath(template):
            yield f"{flag} and --load-debug-rollout-data are both {template}: the dump would overwrite itself"
        for _, path in RolloutPath(template, named="eval_").present():
            if Path(os.path.realpath(path)) in read:
                yield f"{flag} {template} would overwrite {read[Path(os.path.realpath(path))]}: choose another name"
            if not is_dump(path):
                yield f"{flag} {template} would overwrite {path}, which no run wrote: choose another name"
    # the run folder
    run_dir = Path(config.output_dir)
    written = run_dir / "config.yaml"
    by_a_run = written.is_file() and written.read_bytes().startswith(RESOLVED.encode())
    if written.exists() and not by_a_run:
        yield f"--output-dir {run_dir} has a config.yaml that no run wrote and this one would overwrite: choose another"
    if not by_a_run and not (run_dir / _RUN_LOCK).exists():
        for name in _RUN_FILES:
            if (run_dir / name).exists():
                yield f"--output-dir {run_dir} has a {name} that no run wrote: choose another folder"


def _version_root(config: Config) -> Path:
    return Path(os.path.realpath(config.update_weight_disk_dir or Path(config.output_dir) / "weights"))


def _check_writable(place: FlaggedPath) -> None:
    """Write and remove a probe file at the path, or in the folder where it will be created."""
    path = RolloutPath(place.path)
    folder = path.fixed_folder if place.is_replaced or not path.is_one else Path(path.real)
    if path.is_one and os.path.lexists(path.real) and not os.path.isdir(path.real):
        raise UserError(f"{place} is a file, but a folder is needed")
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{place} cannot be created: {folder} is a file")
    probe = folder / f".slime-probe-{uuid.uuid4().hex}"
    try:
        probe.mkdir()
        try:
            (probe / "file").write_bytes(bytes(_PROBE_BYTES))
        finally:
            shutil.rmtree(probe, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror} in {folder}): choose another folder") from error
