"""Load a causal language model from a Hugging Face folder, and save one.

Invariant: a model that is returned has every weight read from the folder (nothing left at random initialisation) and a
vocabulary that covers its tokenizer. Whatever is wrong with the folder is one `UserError` naming the folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from slime.errors import UserError
from slime.models.folder import check_architecture, check_tokenizer_fits, first_line, read_config_json
from slime.models.saving import save_hf_folder

__all__ = ["load_causal_lm", "load_config", "read_config_json", "save_hf_folder"]


def load_config(folder: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The transformers config of a causal language model folder."""
    facts = check_architecture(folder, trust_remote_code=trust_remote_code)
    model_type = facts.get("model_type")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, OSError) as cause:
        reason = first_line(cause.__cause__ or cause)
        raise UserError(f"{folder}/config.json is not a valid {model_type} config: {reason}") from cause
    if "auto_map" not in facts and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model folder {folder} holds a {model_type} model, which is no causal language model: choose another model"
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
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if not any(Path(folder).glob("*.safetensors")):
        raise UserError(f"model folder {folder} has no *.safetensors weights: download them, or convert the folder")
    check_tokenizer_fits(folder, config.get_text_config().vocab_size)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as cause:
        raise UserError(f"the weights in {folder} cannot be loaded: {first_line(cause)}") from cause
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"the weights in {folder} lack {missing[0]}{more}: download the model folder again")
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"])[0]
        raise UserError(
            f"{name} in {folder} has shape {tuple(found)} but its config.json asks for {tuple(wanted)}: "
            "the weights belong to another model"
        )
    return model.to(device).eval()
