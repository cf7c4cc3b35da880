"""Lossless conversion of samples to JSON and back, and display text for prompts, labels and rewards.

In JSON, arrays become tagged base64; every other value must already be a JSON value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.errors import UserError
from slime.storage.json_types import JsonObject

_ARRAY_TAG = "__ndarray__"


def sample_to_json(sample: Sample) -> JsonObject:
    """Convert a sample to JSON values; a `UserError` names a field that JSON cannot represent."""
    return {key: to_json(value, f"sample {sample.index}, {key}") for key, value in sample.to_dict().items()}


def sample_from_json(data: JsonObject) -> Sample:
    """Invert `sample_to_json`."""
    return Sample.from_dict({key: from_json(value) for key, value in data.items()})


def to_json(value: object, where: str, *, lossy: bool = False) -> object:
    """Convert `value` to JSON values; `where` names it in the error if that is impossible.

    With `lossy`, bytes become base64 text, and keys that are not text become text.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes) and lossy:
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {_ARRAY_TAG: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, (list, tuple)):
        return [to_json(item, where, lossy=lossy) for item in value]
    if isinstance(value, dict) and (lossy or all(isinstance(key, str) for key in value)):
        return {str(key): to_json(item, f"{where}.{key}", lossy=lossy) for key, item in value.items()}
    raise UserError(f"{where}: a {type(value).__name__} cannot be saved as JSON; keep only plain values in samples")


def from_json(value: Any) -> Any:
    """Invert `to_json`; tuples come back as lists."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if _ARRAY_TAG in value:
            flat = np.frombuffer(base64.b64decode(value[_ARRAY_TAG]), dtype=np.dtype(value["dtype"]))
            return flat.reshape(value["shape"]).copy()
        return {key: from_json(item) for key, item in value.items()}
    return value


def format_prompt(prompt: object) -> str:
    """Format a prompt as one text; messages are one per line, each with its role."""
    if not isinstance(prompt, list | tuple):
        return format_value(prompt)
    return "\n".join(
        f"{message.get('role')}: {format_value(message.get('content'))}"
        if isinstance(message, Mapping)
        else format_value(message)
        for message in prompt
    )


def format_value(value: object) -> str:
    """Format a label, reward or similar value: text unchanged, None as empty text, other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def visible(text: str) -> str:
    """Escape characters that control a terminal or are not printable."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
