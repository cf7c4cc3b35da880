"""Writes a model folder of any shape with random weights and a byte tokenizer: for runs that need an untrained model of
that size.

Invariant: the folder has the format and tensor names that transformers writes, and loads without warnings. At most one
shard of weights is in memory, for any size of the model.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from slime.errors import UserError
from slime.models.loading import load_config, persistent_buffers, split_fused_weights
from slime.models.saving import FolderDraft
from slime.storage.json_types import JsonMapping

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (_PAD, _START, _END)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WEIGHT_STD = 0.02
TOKENIZER_SIZE = len(_SPECIAL) + 256
"""Number of ids of the tokenizer; the model may have more."""


def write_random_model(config: JsonMapping, folder: Path, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a model of the shape in `config`, a config.json; a folder that slime did not write is never replaced."""
    if config.get("vocab_size", 0) < TOKENIZER_SIZE:
        raise UserError(
            f"vocab_size {config.get('vocab_size')} is too small: the tokenizer of a random model has "
            f"{TOKENIZER_SIZE} tokens, "
            "one for each byte and a few special tokens"
        )
    ids = {"bos_token_id": None, "eos_token_id": _SPECIAL.index(_END), "pad_token_id": _SPECIAL.index(_PAD)}
    with tempfile.TemporaryDirectory() as scratch:
        byte_tokenizer().save_pretrained(scratch)
        (Path(scratch) / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n", encoding="utf-8")
        model = _meta_model(scratch, dtype)
        with FolderDraft.begin(scratch, folder) as draft:
            writer = draft.writer(getattr(torch, dtype))
            device = "cuda" if torch.cuda.is_available() else "cpu"
            chance = torch.Generator(device).manual_seed(seed)
            tensors = [*model.named_parameters(), *persistent_buffers(model)]  # names a tied parameter once
            in_folder = split_fused_weights(model, {name: tensor.detach() for name, tensor in tensors})
            for name, tensor in in_folder.items():
                if tensor.device.type == "meta":  # matrices get normal random numbers, others zeros
                    tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                    if tensor.dim() > 1:
                        tensor.normal_(0.0, _WEIGHT_STD, generator=chance)
                writer.add(name, tensor)
            writer.finish()
            return draft.finish(getattr(torch, dtype))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and a ChatML chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD)
    wrapped.chat_template = _TEMPLATE
    return wrapped


def _meta_model(folder: str, dtype: str) -> PreTrainedModel:
    """The model on the meta device, in which modules without matrices (such as norms) have their initial values.

    In modules with matrices the other parameters are biases.
    """
    config = load_config(folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or any(parameter.dim() > 1 for parameter in own.values()):
            continue
        for name, parameter in own.items():
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32)))
        model._init_weights(module)
    return model
