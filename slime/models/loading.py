"""Loads causal language models from Hugging Face folders.

Invariant: a returned model has every weight read from the folder (nothing left at random initialisation) and a
vocabulary that covers its tokenizer. Any defect of the folder is one `UserError` that names the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from slime.errors import UserError
from slime.models.dequantized import plain_tensors
from slime.models.folder import (
    SAME_CODE,
    block_size,
    check_architecture,
    check_tokenizer_fits,
    first_line,
    read_config_json,
)

REPORT_OPTIONS = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Puts mismatches into transformers' report, for `check_complete`: transformers' own error names no tensor."""


def load_config(folder: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The transformers config of a causal language model folder."""
    facts = check_architecture(folder, trust_remote_code=trust_remote_code)
    model_type = facts.get("model_type")
    try:
        if model_type in SAME_CODE:  # under the name of the code that runs the model; needs no remote code
            own = {name: value for name, value in facts.items() if name not in ("auto_map", "architectures")}
            code_type = SAME_CODE[facts["model_type"]]
            config: PretrainedConfig = CONFIG_MAPPING[code_type].from_dict({**own, "model_type": code_type})
            config.name_or_path = str(folder)
            return config
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, OSError) as cause:
        reason = first_line(cause.__cause__ or cause)
        raise UserError(f"{folder}/config.json is not a valid {model_type} config: {reason}") from cause
    if "auto_map" not in facts and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model folder {folder} holds a {model_type} model, not a causal language model: choose another model"
        )
    return config


def load_causal_lm(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    attn_implementation: str,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model of `folder` in `dtype` on `device`, in eval mode."""
    config = load_weights_config(folder, trust_remote_code=trust_remote_code)
    how = {"config": config, "dtype": dtype, "attn_implementation": attn_implementation}
    with errors_of(folder):
        if block_size(read_config_json(folder)) is not None:
            weights = {name: tensor.to(dtype) for name, tensor in plain_tensors(Path(folder))}
            model, report = load_tensors(folder, weights, trust_remote_code=trust_remote_code, **how)
        else:
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                **REPORT_OPTIONS,
                **how,
            )
    check_complete(folder, report)
    return model.to(device).eval()


def load_weights_config(folder: str | Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The config of a folder; UserError unless the folder has weights and a tokenizer that fits."""
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if not any(Path(folder).glob("*.safetensors")):
        raise UserError(f"model folder {folder} has no *.safetensors weights: download them, or convert the folder")
    check_tokenizer_fits(folder, config.get_text_config().vocab_size)
    return config


@contextmanager
def errors_of(folder: str | Path) -> Iterator[None]:
    """Turns the errors of transformers and safetensors about weights into a one-line UserError."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as cause:
        raise UserError(f"the weights in {folder} cannot be loaded: {first_line(cause)}") from cause


def check_complete(folder: str | Path, report: dict[str, Any]) -> None:
    """Raise UserError for missing or mismatched weights, by transformers' report."""
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"the weights in {folder} lack {missing[0]}{more}: download the model folder again")
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"])[0]
        raise UserError(
            f"{name} in {folder} has shape {tuple(found)}, but its config.json asks for {tuple(wanted)}: correct it, "
            "or take config and weights of the same model"
        )


def load_tensors(
    folder: str | Path,
    weights: Mapping[str, torch.Tensor],
    *,
    config: PretrainedConfig,
    trust_remote_code: bool,
    **how: object,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model from plain tensors under the folder's names; returns the model and transformers' report.

    For a folder in blocks of 8-bit floats, dequantised, since training and sampling use plain numbers. transformers'
    own reader requires matrices whose sides are multiples of the block size, which not all of DeepSeek's are.
    """
    # chosen as `AutoModelForCausalLM` does
    own_code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own_code is not None and trust_remote_code:
        kind = get_class_from_dynamic_module(own_code, str(folder), local_files_only=True)
    else:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is None:
            raise UserError(
                f"model folder {folder} has a config.json without a class for causal language models: choose another "
                "model"
            )
    for place in (config, config.get_text_config()):
        if hasattr(place, "quantization_config"):
            del place.quantization_config
    if not isinstance(config, getattr(kind, "config_class", None) or type(config)):
        config = config.get_text_config()  # the language part of a multimodal model
    model, report = kind.from_pretrained(None, config=config, state_dict=weights, **REPORT_OPTIONS, **how)
    model.config.name_or_path = str(folder)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model, report


def persistent_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """The buffers that belong to the weights and are saved with them."""
    names = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in names]


def split_fused_weights(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo, for one layer, the fusing of weights that transformers does while loading (such as a layer's experts)."""
    return revert_weight_conversion(model, tensors)
