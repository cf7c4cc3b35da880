"""Checks that a path is a complete model folder, with remedies for what is often given instead.

Invariant: a folder that passes has a config.json with a model type, and (unless only its config is needed) complete
weights: every file that its index names, each as long as its header says and with every tensor that the index lists
for it. Only headers and file lengths are read, so the check takes milliseconds for a model of any size, and nothing is
imported for it.

Megatron's checkpoints are recognised by the files in a folder; nothing in them is opened here, as their index is
pickled. `slime.models.torch_dist` reads the weights of torch_dist checkpoints:

    <folder>/latest_checkpointed_iteration.txt   a number, or `release`
             iter_0000100/ or release/           .metadata and *.distcp (torch_dist), or mp_rank_* (torch)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.config.fields import nearest_name
from slime.config.megatron_flags import COMPARED_SHAPE_KEYS
from slime.errors import UserError
from slime.models.folder import read_safetensors_header
from slime.storage.json_types import JsonObject

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DOWNLOAD_AGAIN = "download the folder again"
_LFS_POINTER = b"version https://git-lfs"
_PADDED = {"vocab_size": ["vocab_size"], "max_position_embeddings": ["max_position_embeddings"]}
"""Not compared: Megatron pads vocabularies, and with rotary positions the longest sequence has no effect."""


def read_shape(file: Path) -> dict[str, tuple[str, float]]:
    """Read the numbers of a model's shape: Megatron's name -> the name in config.json, and the number."""
    model = read_model_config(file)
    for nested in (model.get("rope_scaling"), model.get("rope_parameters")):  # where newer files have them
        if isinstance(nested, dict):
            rotary = ("rope_theta", "partial_rotary_factor", "factor")
            model = {**model, **{name: nested[name] for name in rotary if name in nested}}
    numbers = {
        name: value for name, value in model.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    found: dict[str, tuple[str, float]] = {}
    for name, keys in {**COMPARED_SHAPE_KEYS, **_PADDED}.items():
        key = next((key for key in keys if key in numbers), None)
        if key is not None:
            found[name] = (key, numbers[key])
    return found


def read_model_config(file: Path) -> JsonObject:
    """Read config.json of a model folder; of a multimodal model only the part about text."""
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"model folder {file.parent} has no config.json: --hf-checkpoint needs a Hugging Face folder"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(model, dict):
        raise UserError(f"{file} does not hold a JSON object: --hf-checkpoint needs a Hugging Face folder")
    text = model.get("text_config")
    return text if isinstance(text, dict) else model


def read_header(file: Path, flag: str) -> JsonObject:
    """Return the tensors of a safetensors file by name; raise a `UserError` if it is truncated or not such a file."""
    try:
        size = file.stat().st_size
        tensors, _, start = read_safetensors_header(file)
    except OSError as error:
        raise UserError(f"{flag}: cannot read {file} ({error.strerror})") from error
    except ValueError as error:
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(f"{flag}: {file} is only a Git LFS pointer: run git lfs pull in that folder") from None
        raise UserError(f"{flag}: {file} is not a safetensors file, or is truncated: {DOWNLOAD_AGAIN}") from error
    try:
        wanted = start + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (TypeError, KeyError, IndexError, ValueError):
        raise UserError(f"{flag}: the header of {file} is broken: {DOWNLOAD_AGAIN}") from None
    if size != wanted:
        raise UserError(f"{flag}: {file} has {size} of the {wanted} bytes that its header names: {DOWNLOAD_AGAIN}")
    return tensors


def check_weights(folder: Path, flag: str) -> dict[str, JsonObject]:
    """Return the header entries of all tensors by name; raise a `UserError` unless the weights are complete.

    A single file has precedence over an index, as in transformers.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return read_header(single, flag)
    if not index.exists():
        if any(folder.glob("*.safetensors")):
            names = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3])
            raise UserError(f"{flag} {folder} has {names}, but no {INDEX} that lists their tensors: {DOWNLOAD_AGAIN}")
        hint = f"there is no {SINGLE}, {DOWNLOAD_AGAIN}"
        if any(folder.glob("*.bin")):
            hint = f"its .bin files are not read (they may run code), convert them with {conversion(folder)}"
        elif any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
            hint = "its .pt or .pth files are not read, take the model's safetensors"
        raise UserError(f"{flag} {folder} has no weights: {hint}")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{flag}: {index} is not an index of weights ({type(error).__name__}): {DOWNLOAD_AGAIN}"
        ) from error
    absent = sorted({file.name for file in files.values() if not file.exists()})
    if absent:
        of = f"{len(absent)} of {len(set(files.values()))} weight files"
        raise UserError(f"{flag}: {folder} lacks {of}, {absent[0]} first: {DOWNLOAD_AGAIN}")
    found = {file: read_header(file, flag) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in found[file]:
            raise UserError(f"{flag}: {file} lacks {name}, which {INDEX} lists in it: {DOWNLOAD_AGAIN}")
    return {name: found[file][name] for name, file in files.items()}


def conversion(folder: Path) -> str:
    """Return a command that converts a folder with .bin files to safetensors."""
    target = f"{folder.absolute()}-safetensors"
    return (
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[c.from_pretrained('{folder}').save_pretrained('{target}') for c in (M, T)]\""
    )


LATEST = "latest_checkpointed_iteration.txt"
"""File that names the newest checkpoint of a folder, in Megatron and here."""
_RELEASE = "release"
_INDEX = ".metadata"
_KINDS = {"torch_dist": ("*.distcp", "common.pt"), "torch": ("mp_rank_*",)}


def read_latest(folder: Path) -> str | None:
    """Read the name of a folder's newest checkpoint; None if the folder has no such file."""
    file = folder / LATEST
    if not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): choose another folder") from error


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A Megatron checkpoint; its kind is None if only its name identifies it."""

    path: Path
    kind: str | None

    def __str__(self) -> str:
        return self.path.name if self.kind is None else f"{self.kind}, {self.path.name}"


def find_megatron(folder: Path, step: int | None = None) -> MegatronCheckpoint | None:
    """Find the Megatron checkpoint in a folder: the folder itself, its newest or that of `step`; else None."""
    if not folder.is_dir():
        return None
    latest = read_latest(folder)
    if latest is None:
        kind = _kind(folder)
        return None if kind is None else MegatronCheckpoint(folder, kind)
    name = _RELEASE if latest == _RELEASE else f"iter_{int(latest):07d}" if latest.isdecimal() else latest
    if step is not None:
        name = f"iter_{step:07d}"
    kind = _kind(folder / name)
    if kind is None and latest != _RELEASE:  # only Megatron writes `release`
        return None
    return MegatronCheckpoint(folder / name, kind)


def find_readable_megatron(folder: Path, what: str, step: int | None = None) -> Path | None:
    """Return the torch_dist checkpoint in a folder, None without a Megatron checkpoint; `what` is the folder's flag."""
    found = find_megatron(folder, step)
    if found is None:
        return None
    if found.kind == "torch":
        raise UserError(
            f"{what} is a Megatron checkpoint ({found}) of pickled objects, which are never opened here: convert it "
            "with Megatron to torch_dist (--ckpt-convert-format torch_dist)"
        )
    if not (found.path / _INDEX).is_file():
        raise UserError(f"{what} is a Megatron checkpoint ({found}) without {_INDEX}: it is incomplete, copy it again")
    return found.path


def refuse_megatron(folder: str, flag: str) -> None:
    """Raise a `UserError` for a Megatron checkpoint where a model folder is needed."""
    found = find_megatron(Path(folder))
    if found is not None:
        raise UserError(
            f"{flag} {folder} is a Megatron checkpoint ({found}), but a Hugging Face folder is needed: convert it "
            "with slime convert, or give it as --load or --ref-load"
        )


def _kind(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    return next((kind for kind, patterns in _KINDS.items() if any(any(folder.glob(one)) for one in patterns)), None)


_HUB_NAME = re.compile(r"(?:[\w.-]+/)?\w[\w.-]*")
_CHECKPOINTS = (LATEST, "meta.json")
_SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_layer_freq",
    "first_k_dense_replace",
    "norm_topk_prob",
    "routed_scaling_factor",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "rope_factor",
    "rms_norm_eps",
    "hidden_act",
)
"""Keys of config.json that must be equal for the weights of one model to fit another's config."""

_NAMES = frozenset(_SHAPE) | {"architectures", "max_position_embeddings", "torch_dtype", "dtype", "quantization_config"}
_MISSPELT = 0.9
"""Similarity to a known name from which an unknown key of config.json counts as a misspelling."""

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
LLAMA_LIKE = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mimo",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Families whose layers have the names and sizes of `_ROWS`."""
_ROWS = {
    "self_attn.q_proj.weight": ("num_attention_heads", "head_dim"),
    "self_attn.k_proj.weight": ("num_key_value_heads", "head_dim"),
    "self_attn.v_proj.weight": ("num_key_value_heads", "head_dim"),
    "mlp.gate_proj.weight": ("intermediate_size",),
}
_OWN_HEAD_DIM = ("gemma", "gemma2", "gemma3_text", "qwen3")
"""Families whose default head size is not hidden_size / num_attention_heads."""
_LAYER = re.compile(r"(?:model|model\.language_model|language_model\.model)\.layers\.(\d+)\.")


def check_model_folder(folder: str, flag: str, *, weights: bool = True) -> None:
    """Raise a `UserError` unless `folder` is a Hugging Face model folder, with complete weights if `weights`."""
    path = Path(folder)
    if not path.exists():
        hint = f"{flag} takes the path of a downloaded Hugging Face model"
        if _HUB_NAME.fullmatch(folder):
            target = f"models/{folder.rpartition('/')[2]}"
            hint += f"; if this is its name on the hub: hf download {folder} --local-dir {target} and {flag} {target}"
        raise UserError(f"there is no model folder {folder}: {hint}")
    if path.suffix == ".gguf":
        raise UserError(f"{flag} {folder} is a GGUF file, {_GGUF}")
    if not path.is_dir():
        raise UserError(f"{flag} {folder} is a file, but a model folder is needed")
    if (path / "adapter_config.json").exists():
        try:
            of_base = f" of {json.loads((path / 'adapter_config.json').read_text('utf-8'))['base_model_name_or_path']}"
        except (OSError, ValueError, KeyError, TypeError):
            of_base = ""
        raise UserError(f"{flag} {folder} holds a LoRA adapter{of_base}: {_MERGE}")
    if not (path / "config.json").exists():
        refuse_megatron(folder, flag)
        hint = f"{flag} takes a Hugging Face model folder"
        if any(path.glob("*.gguf")):
            hint = f"its GGUF files are {_GGUF}"
        elif any((path / name).exists() for name in _CHECKPOINTS):
            hint = f"it holds checkpoints of a run, {hint} such as --save-hf writes"
        raise UserError(f"model folder {folder} has no config.json: {hint}")
    config = read_model_config(path / "config.json")
    for name in config.keys() - _NAMES:
        meant = nearest_name(name, _NAMES - config.keys(), cutoff=_MISSPELT)
        if meant is not None:
            raise UserError(f"{path / 'config.json'} has {name} but not {meant}: correct the spelling")
    if "model_type" not in config:
        raise UserError(f"{path / 'config.json'} has no model_type: it does not describe a Hugging Face model")
    if weights:
        _check_sizes(path, config, check_weights(path, flag))


def _check_sizes(folder: Path, config: JsonObject, tensors: dict[str, JsonObject]) -> None:
    """Raise a `UserError` if config.json contradicts the embedding or the number of layers in the weights.

    For families with Llama's layers, attention heads and feed-forward are also compared; loading compares all shapes.
    """
    text = config.get("text_config")
    facts = {**text, **config} if isinstance(text, dict) else config
    embedding = next((entry["shape"] for name, entry in tensors.items() if name in _EMBEDDINGS), None)
    if embedding is not None and len(embedding) == 2 and "word_embed_proj_dim" not in facts:
        for name, found in zip(("vocab_size", "hidden_size"), embedding, strict=True):
            if isinstance(facts.get(name), int) and facts[name] != found:
                raise UserError(
                    f"{folder / 'config.json'} has {name} {facts[name]}, but the embedding in the weights has {found}: "
                    f"correct {name}, or take config and weights of the same model"
                )
    layers = {int(match[1]) for match in map(_LAYER.match, tensors) if match is not None}
    wanted = facts.get("num_hidden_layers")
    if layers and isinstance(wanted, int) and max(layers) + 1 < wanted:
        raise UserError(
            f"{folder / 'config.json'} has num_hidden_layers {wanted}, but the weights have {max(layers) + 1} layers: "
            "correct it, or take config and weights of the same model"
        )
    own = text if isinstance(text, dict) else config
    if own.get("model_type") not in LLAMA_LIKE:
        return
    sizes = {name: size for name, size in own.items() if isinstance(size, int)}
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads", 0)
    if own.get("head_dim") is None and own["model_type"] not in _OWN_HEAD_DIM and hidden is not None and heads > 0:
        sizes["head_dim"] = hidden // heads
    for name, entry in tensors.items():
        match = _LAYER.match(name)
        keys = _ROWS.get(name[match.end() :], ()) if match is not None else ()
        if not keys or not sizes.keys() >= set(keys) or str(entry.get("dtype"))[0] not in "BF":
            continue  # integers may be packed
        found_shape = tuple(entry["shape"])
        wanted_shape = (math.prod(sizes[key] for key in keys), *found_shape[1:])
        if found_shape != wanted_shape:
            which = ", ".join(f"{key} {sizes[key]}" for key in keys)
            raise UserError(
                f"{name} in {folder} has shape {found_shape}, but its config.json requires {wanted_shape} ({which}): "
                "correct it, or take config and weights of the same model"
            )


def check_same_shape(folder: Path, flag: str, hf_checkpoint: str, *, only: Sequence[str] = _SHAPE) -> None:
    """Raise a `UserError` if the weights of `folder` do not fit the model of `--hf-checkpoint`."""
    theirs, ours = _normalized_config(folder), _normalized_config(Path(hf_checkpoint))
    for name in only:
        if name in theirs and name in ours and theirs[name] != ours[name]:
            raise UserError(
                f"{flag} {folder} has {name} {theirs[name]}, but --hf-checkpoint {hf_checkpoint}, whose config and "
                f"tokenizer the engines use, has {ours[name]}: give two folders of the same model"
            )


def _normalized_config(folder: Path) -> JsonObject:
    """Read config.json with rotary settings of all transformers versions under the same names, without nulls."""
    facts = read_model_config(folder / "config.json")
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):  # not per layer type
        kind = rope.get("rope_type") or rope.get("type") or "default"
        base = rope.get("rope_theta", facts.get("rope_theta"))
        facts = {**facts, "rope_theta": base, "rope_type": kind, "rope_factor": rope.get("factor", 1.0)}
    return {name: value for name, value in facts.items() if value is not None}


_GGUF = "a format for inference: give the folder of the original model, with config.json and safetensors"
_MERGE = (
    "give its base model, and the adapter with --lora-load to train it further; or merge the two (peft: "
    "model.merge_and_unload().save_pretrained(DIR)) and give that folder"
)


def dataset_hint(path: str, flag: str) -> str:
    """Return the end of the sentence for a missing data file, if it may be the name of a dataset on the hub."""
    if "/" not in path or not _HUB_NAME.fullmatch(path) or Path(path).suffix:
        return ""
    target = f"data/{path.rpartition('/')[2]}"
    return (
        f"; if this is its name on the hub: hf download {path} --repo-type dataset --local-dir {target} and {flag} "
        f"with a .jsonl or .parquet file of {target}"
    )
