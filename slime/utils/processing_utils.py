"""Tokenizer and image helpers under the path that slime plugins import them from."""

from __future__ import annotations

import base64
import io
from typing import Any

from slime.data.tokenizer import load_tokenizer

__all__ = ["encode_image_for_rollout_engine", "load_tokenizer"]


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as the PNG data URL that ``image_data`` of ``/generate`` takes."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
