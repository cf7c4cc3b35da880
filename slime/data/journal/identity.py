"""The facts that make a journal the journal of this run.

Invariant: they say what was sampled from what, and nothing about where files lie: a run folder or a model that moved is
the same run, another model, other prompts or other functions are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.data.rows import file_bytes, split_slice

RunIdentity = dict[str, str]

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "tekken", "tiktoken", "chat_template", "special_tokens")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def run_identity(config: Any, prompt_files: Sequence[str] | None = None) -> RunIdentity:
    """Named facts of a run; none of them needs more than reading a few small files.

    `prompt_files` are those of `--prompt-config`; None: that of `--prompt-data`.
    """
    if prompt_files is None:
        prompt_files = [] if config.prompt_data is None else [config.prompt_data]
    model = Path(config.hf_checkpoint)
    return {
        "model": _model(model),
        "tokenizer": _digest(file.read_bytes() for file in _tokenizer_files(model)) if model.is_dir() else str(model),
        "prompt data": _prompts(config, prompt_files),
        "data source": str(config.data_source_path),
        "rollout function": str(config.rollout_function_path),
        "generate function": str(config.custom_generate_function_path or "default"),
        "samples per prompt": str(config.n_samples_per_prompt),
        "rollout seed": str(config.rollout_seed),
    }


def _model(folder: Path) -> str:
    """config.json by content, weight files by name and size."""
    if not folder.is_dir():
        return str(folder)
    config = folder / "config.json"
    weights = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    names = "\n".join(f"{file.name} {file.stat().st_size}" for file in weights)
    total = sum(file.stat().st_size for file in weights)
    facts = _digest([config.read_bytes() if config.is_file() else b"", names.encode()])
    return f"{facts}, {total} bytes of weights"


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name.startswith(_TOKENIZER_FILES))


def _prompts(config: Any, files: Sequence[str]) -> str:
    if not files or config.disable_rollout_global_dataset:
        return "none"
    return "; ".join(map(_file, files))


def _file(path: str) -> str:
    file, chosen = split_slice(path)
    rows = "" if chosen == slice(None) else f" rows {chosen.start or 0}:{'' if chosen.stop is None else chosen.stop}"
    size = f", {file_bytes(path)} bytes" if Path(file).is_file() else ""
    return f"{Path(file).name}{rows}{size}"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
