"""Tokenizer, processor and image helpers under the path that slime plugins import them from."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from slime.data import chat_template

__all__ = ["build_processor_kwargs", "encode_image_for_rollout_engine", "load_processor", "load_tokenizer"]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a model folder or hub name; further arguments are those of transformers."""
    return chat_template.load_tokenizer(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """The processor of a multimodal model folder; None for a text model. Further arguments are transformers'."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):  # what transformers raises for a folder without one
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a processor call: the inputs, and tensors as the answer for each kind of them."""
    inputs = dict(multimodal_inputs or {})
    for kind in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        inputs[kind] = {**inputs.get(kind, {}), "return_tensors": "pt"}
    return inputs


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as the PNG data URL that ``image_data`` of ``/generate`` takes."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
