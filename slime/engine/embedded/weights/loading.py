"""Loads new weights into the served model, in place.

Invariant: an update is applied whole or not at all: names and shapes of every tensor are checked before the first one
is copied. Tensors come as safetensors (files or bytes) under the model's Hugging Face names; pickles are never read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from slime.engine.embedded.errors import BadRequest, Conflict, PartialWrite, shown
from slime.engine.embedded.weights.parameter_views import FolderViews
from slime.errors import UserError
from slime.models.delta.folder import BadDelta, BaseMismatch, DeltaIndex, delta_entries
from slime.models.folder import read_config_json

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedModel

_DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"}


class DifferentWeights(BadRequest):
    """The result of a delta does not have the sender's checksum: the weights here were not the delta's base."""


def load_from_files(views: FolderViews, paths: Sequence[str], *, config_folder: str) -> int:
    """Copy the tensors of safetensors files into the model; returns the bytes copied.

    Names that only a model folder has (transformers fuses the experts of a layer while loading, for example) are
    written to parts of the model's own tensors; if that is impossible, transformers' loader reads the files, with the
    config of `config_folder`.
    """
    with _open_files(paths) as files:
        names = {name: path.name for path, tensors in files for name in tensors.keys()}  # noqa: SIM118
        targets = views.targets(names)
        if not names.keys() <= targets.keys():
            in_folder = names_in([str(path) for path in Path(config_folder).glob("*.safetensors")])
            if not in_folder <= views.model.state_dict().keys():  # the model's own names are others
                return _load_through_transformers(views, paths, names, config_folder, trust_remote_code=False)
        for path, tensors in files:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                part = tensors.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise BadRequest(f"{name} is stored as {part.get_dtype()} in {path}, which this engine cannot read")
                _check(targets, name, tuple(part.get_shape()), str(path))
        return _copy_all(
            (targets[name], tensors.get_tensor(name))
            for _, tensors in files
            for name in tensors.keys()  # noqa: SIM118
        )


def _load_through_transformers(
    views: FolderViews, paths: Sequence[str], names: dict[str, str], config_folder: str, *, trust_remote_code: bool
) -> int:
    """Create a model folder around the files, load it as any folder, and copy its tensors."""
    with tempfile.TemporaryDirectory() as parent:
        scratch = Path(parent) / Path(config_folder).name  # transformers caches a folder's code under this name
        scratch.mkdir()
        for path in paths:
            (scratch / Path(path).name).symlink_to(Path(path).resolve())
        index = {"metadata": {"total_size": 0}, "weight_map": names}
        (scratch / "model.safetensors.index.json").write_text(json.dumps(index))
        for file in ("config.json", *(path.name for path in Path(config_folder).glob("*.py") if trust_remote_code)):
            shutil.copy(Path(config_folder) / file, scratch)
        return load_from_folder(views, str(scratch), home=str(scratch), trust_remote_code=trust_remote_code)


@contextmanager
def _open_files(paths: Sequence[str]) -> Iterator[list[tuple[Path, safe_open]]]:
    try:
        if strange := [p for p in paths if not Path(p).is_file()]:
            raise BadRequest(f"cannot read weights from {shown(strange[0])}: there is no such file", "paths")
        opened = [(Path(p), safe_open(p, framework="pt")) for p in paths]
    except (OSError, UnicodeError, SafetensorError) as cause:
        raise BadRequest(f"cannot read weights from {shown(list(paths))}: {cause}", "paths") from cause
    yield opened


def tensors_in(body: bytes) -> dict[str, torch.Tensor]:
    """Parse the tensors of a safetensors blob from an HTTP body."""
    try:
        return safetensors.torch.load(body)
    except SafetensorError as cause:
        raise BadRequest(f"the body is not a safetensors blob: {cause}") from cause
    except KeyError as cause:  # raised by safetensors for a dtype without a torch type
        raise BadRequest(f"the body has a tensor of dtype {cause}, which this engine cannot read") from cause


def load_tensors(views: FolderViews, tensors: Mapping[str, torch.Tensor], source: str) -> int:
    """Copy tensors from memory into the model; returns the bytes copied."""
    targets = views.targets(tensors.keys())
    for name, tensor in tensors.items():
        _check(targets, name, tuple(tensor.shape), source)
    return _copy_all((targets[name], tensor) for name, tensor in tensors.items())


def check_shapes(views: FolderViews, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse names and shapes that the model does not have."""
    targets = views.targets(shapes.keys())
    for name, shape in shapes.items():
        _check(targets, name, shape, source)


def load_from_folder(views: FolderViews, folder: str, *, home: str, trust_remote_code: bool) -> int:
    """Load a Hugging Face folder; transformers' loader reads it if its names differ from the model's own.

    With `trust_remote_code`, and if the served model's folder (`home`) has code of its own, that code reads the
    weights. Code in any other folder is never run.
    """
    paths = sorted(str(p) for p in Path(folder).glob("*.safetensors"))
    if not paths:
        raise BadRequest(f"{folder} has no *.safetensors files")
    names = names_in(paths)
    if names <= views.targets(names).keys():
        if missing := views.missing(names):  # these would keep their old values
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BadRequest(f"{folder} lacks {missing[0]}{more}: a model folder has every tensor of the model")
        return load_from_files(views, paths, config_folder=folder)
    if trust_remote_code and Path(folder).resolve() != Path(home).resolve():
        if "auto_map" in read_config_json(home):
            files = _files_by_tensor(paths)
            return _load_through_transformers(views, paths, files, home, trust_remote_code=True)
        trust_remote_code = False
    targets, dtype = views.model.state_dict(), next(views.model.parameters()).dtype
    loaded = read_model(folder, dtype, trust_remote_code=trust_remote_code).state_dict()
    for name, tensor in loaded.items():
        _check(targets, name, tuple(tensor.shape), folder)
    return _copy_all((targets[name], tensor) for name, tensor in loaded.items())


def read_model(folder: str, dtype: torch.dtype, *, trust_remote_code: bool, problem: str = "") -> PreTrainedModel:
    """Read a model through transformers, on the host; `problem` begins the message if that is impossible."""
    from slime.models.loading import load_causal_lm

    try:
        return load_causal_lm(
            folder, dtype=dtype, device="cpu", attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    except UserError as cause:
        raise BadRequest(f"{problem}{cause}") from cause


def names_in(paths: Sequence[str]) -> set[str]:
    """List the tensors of safetensors files."""
    return set(_files_by_tensor(paths))


def _files_by_tensor(paths: Sequence[str]) -> dict[str, str]:
    """Map each tensor to the name of its file."""
    with _open_files(paths) as files:
        return {name: path.name for path, tensors in files for name in tensors.keys()}  # noqa: SIM118


def is_whole(views: FolderViews, names: set[str]) -> bool:
    """True if an update of `names` overwrites all weights, as every update through transformers' loader does."""
    return not names <= views.targets(names).keys() or not views.missing(names)


def load_from_delta(views: FolderViews, folder: Path, index: DeltaIndex, *, version: str) -> int:
    """Bring the model from `version` to the delta's; returns the bytes of its blobs."""
    from slime.models.delta.apply import ChecksumMismatch, PartiallyApplied, apply_to_tensors  # zstandard, xxhash

    try:
        index.require_base(version, delta=folder, owner="this engine")
        entries = list(delta_entries(folder, index))
        targets = views.targets(index.weight_map.keys())
        for entry in entries:
            if entry.name not in targets:
                raise BadRequest(f"{folder} changes a tensor {entry.name!r} that this model does not have on its own")
        return apply_to_tensors(targets, entries, index)
    except BaseMismatch as cause:
        raise Conflict(str(cause)) from cause
    except ChecksumMismatch as cause:
        raise DifferentWeights(str(cause)) from cause
    except PartiallyApplied as cause:
        raise PartialWrite(f"the delta was applied in part: {cause}") from cause
    except (OSError, BadDelta, MemoryError, RuntimeError) as cause:  # a GPU without memory is a RuntimeError
        raise BadRequest(f"cannot apply the delta: {cause}") from cause


def _check(targets: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], source: str) -> None:
    if name not in targets:
        raise BadRequest(f"{source} has a tensor {name!r} that this model does not have")
    if tuple(targets[name].shape) != shape:
        raise BadRequest(f"{name} has shape {shape} in {source} but {tuple(targets[name].shape)} in this model")


@torch.no_grad()
def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Copy each second tensor over the first; returns the bytes copied. An error leaves the model half written."""
    copied = 0
    try:
        for target, tensor in pairs:
            target.copy_(tensor, non_blocking=False)
            copied += tensor.nbytes
    except (OSError, RuntimeError, SafetensorError) as cause:
        raise PartialWrite(f"new weights could not be copied after {copied} bytes: {cause}") from cause
    return copied
