"""Tokenizer, processor and image helpers, under the import path of slime plugins."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from slime.data import chat_template

__all__ = ["build_processor_kwargs", "encode_image_for_rollout_engine", "load_processor", "load_tokenizer"]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Load the tokenizer of a model folder or hub name; further arguments are passed to transformers."""
    return chat_template.load_tokenizer(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """Load the processor of a multimodal model folder (None for a text model); more arguments go to transformers."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):  # transformers raises these for a folder without one
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build the arguments of a processor call: the inputs, with tensors as the return type of each kind."""
    inputs = dict(multimodal_inputs or {})
    for kind in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        inputs[kind] = {**inputs.get(kind, {}), "return_tensors": "pt"}
    return inputs


def encode_image_for_rollout_engine(image: Any) -> str:
    """Encode a PIL image as a PNG data URL for ``image_data`` of ``/generate``."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
