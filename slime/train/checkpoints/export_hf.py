"""Exports a checkpoint of a run as Hugging Face tensors, without starting a trainer.

Invariant: every tensor has its name and shape from the model folder that the run started from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.config.initial_weights import LATEST, iteration, read_checkpoint_adapter
from slime.errors import UserError
from slime.models.dequantized import plain_tensors
from slime.models.hf_tensor_plan import group_by_layer
from slime.models.loading import load_config, split_fused_weights
from slime.models.lora import is_adapter
from slime.models.peft_adapter import Adapter, AdapterConfig, merge_lora, peft_name
from slime.models.safetensors_io import open_weights
from slime.storage.json_types import JsonMapping
from slime.train.backend import NamedTensor
from slime.train.checkpoints.reader import SavedTensors


def find_checkpoint(folder: Path) -> Path | None:
    """Return the folder if it is a checkpoint, or the newest checkpoint in it; None for any other folder."""
    if (folder / "meta.json").is_file():
        return folder
    latest = folder / LATEST
    number = latest.read_text().strip() if latest.is_file() else ""
    return iteration(folder, int(number)) if number.isdecimal() else None


def model_of_checkpoint(checkpoint: Path) -> Path:
    """Return the model folder that the run of a checkpoint started from."""
    folder = _recorded_model_folder(checkpoint)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"checkpoint {checkpoint} is of the model in {folder}, which does not exist: give its folder "
            "with --hf-checkpoint"
        )
    return folder


def _recorded_model_folder(checkpoint: Path) -> Path:
    """Read the model folder from a checkpoint's metadata."""
    try:
        return Path(str(json.loads((checkpoint / "meta.json").read_text())["hf_checkpoint"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / 'meta.json'} cannot be read ({error}): the checkpoint is damaged") from error


def checkpoint_tensors(
    checkpoint: Path, model_folder: Path, *, add_missing: bool = False, trust_remote_code: bool = False
) -> Iterator[NamedTensor]:
    """Yield the weights under their names in the model folder; with `add_missing` also the untrained ones.

    A checkpoint of an adapter yields the base weights with the adapter merged in.
    """
    lora = read_checkpoint_adapter(checkpoint)
    if lora is not None:
        yield from _adapted_tensors(checkpoint, model_folder, lora, trust_remote_code)
        return
    saved = SavedTensors(checkpoint, "model")
    if not saved.names:
        raise UserError(f"checkpoint {checkpoint} has no weights (model-*.safetensors): choose another one")
    original = open_weights(model_folder)
    model = None if all(name in original for name in saved.names) else _empty_model(model_folder, trust_remote_code)
    written, tied = set(), "lm_head.weight"  # some folders leave out the weight that config.json ties to the embedding
    for members in group_by_layer(saved):
        for name, tensor in (members if model is None else split_fused_weights(model, members)).items():
            if name not in original and name != tied:
                raise UserError(
                    f"checkpoint {checkpoint} has {name}, which {model_folder} lacks: it is of another model, or a "
                    "critic's"
                )
            if name in original and original.shape(name) != tuple(tensor.shape):
                raise UserError(
                    f"{name} is {tuple(tensor.shape)} in checkpoint {checkpoint} but {original.shape(name)} in "
                    f"{model_folder}: give the folder of the same model with --hf-checkpoint"
                )
            written.add(name)
            yield name, tensor
    if add_missing:
        yield from ((name, original[name]) for name in original.names if name not in written)


def _adapted_tensors(
    checkpoint: Path, model_folder: Path, lora: JsonMapping, trust_remote_code: bool
) -> Iterator[NamedTensor]:
    """Yield all base weights, with the adapter merged in; they are first rounded to the trainer's base dtype."""
    facts, saved = AdapterConfig.from_dict({"r": lora["rank"], "lora_alpha": lora["alpha"], **lora}), {}
    for name, tensor in SavedTensors(checkpoint, "model"):
        if not is_adapter(name):
            raise UserError(f"checkpoint {checkpoint} has {name}, which {model_folder} lacks: it is a critic's")
        saved[peft_name(name)] = tensor
    model = _empty_model(model_folder, trust_remote_code)
    pairs = {
        folder_name: pair
        for module, pair in Adapter.from_tensors(facts, saved).pairs.items()
        for folder_name in split_fused_weights(model, {f"{module}.weight": torch.empty(1, 1, device="meta")})
    }
    for name, tensor in _base_tensors(checkpoint, model_folder, lora, trust_remote_code):
        plain = tensor.to(facts.base_dtype) if tensor.is_floating_point() else tensor
        if name not in pairs:
            yield name, plain
            continue
        a, b = pairs.pop(name)
        if tuple(tensor.shape) != (len(b), a.shape[1]):
            shape = (len(b), a.shape[1])
            raise UserError(
                f"the adapter in {checkpoint} is for {name} of shape {shape}, but it is {tuple(tensor.shape)} in "
                f"{model_folder}: give the folder of the same model with --hf-checkpoint"
            )
        yield name, merge_lora(plain, a, b, scale=facts.scale, dtype=torch.float32)
    if pairs:
        raise UserError(
            f"the adapter in {checkpoint} is for {min(pairs)}, which {model_folder} lacks: give the folder of the same "
            "model with --hf-checkpoint"
        )


def _base_tensors(
    checkpoint: Path, model_folder: Path, lora: JsonMapping, trust_remote_code: bool
) -> Iterator[NamedTensor]:
    """Return the adapter's base weights: of the folder or checkpoint in its metadata, unless another one is given."""
    given = model_folder.resolve() != _recorded_model_folder(checkpoint).resolve()
    base = model_folder if given else Path(str(lora.get("base")))
    if (base / "meta.json").is_file():
        return checkpoint_tensors(base, model_folder, trust_remote_code=trust_remote_code)
    if not (base / "config.json").is_file():
        raise UserError(
            f"checkpoint {checkpoint} holds an adapter of the model in {base}, which does not exist: give its folder "
            "with --hf-checkpoint"
        )
    return plain_tensors(base)


def _empty_model(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Make the model without weights; it knows which tensors transformers fuses when loading."""
    config = load_config(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
