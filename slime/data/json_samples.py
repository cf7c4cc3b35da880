"""Samples as JSON and back, exactly: arrays become tagged base64, everything else must already be JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.errors import UserError

_ARRAY_TAG = "__ndarray__"


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values; a `UserError` names the field of a value that JSON cannot hold."""
    return {key: to_json(value, f"sample {sample.index}, {key}") for key, value in sample.to_dict().items()}


def sample_from_json(data: dict[str, Any]) -> Sample:
    """The inverse of `sample_to_json`."""
    return Sample.from_dict({key: from_json(value) for key, value in data.items()})


def to_json(value: Any, where: str) -> Any:
    """`value` as JSON values; `where` names it when it cannot be."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {_ARRAY_TAG: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, (list, tuple)):
        return [to_json(item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    raise UserError(f"{where}: a {type(value).__name__} cannot be saved as JSON; keep only plain values in samples")


def from_json(value: Any) -> Any:
    """The inverse of `to_json` (tuples come back as lists)."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if _ARRAY_TAG in value:
            flat = np.frombuffer(base64.b64decode(value[_ARRAY_TAG]), dtype=np.dtype(value["dtype"]))
            return flat.reshape(value["shape"]).copy()
        return {key: from_json(item) for key, item in value.items()}
    return value


# Values of samples as text for people.


def prompt_text(prompt: Any) -> str:
    """A prompt as one text; of messages one after the other, each with its role."""
    if not isinstance(prompt, list | tuple):
        return value_text(prompt)
    return "\n".join(
        f"{message.get('role')}: {value_text(message.get('content'))}"
        if isinstance(message, Mapping)
        else value_text(message)
        for message in prompt
    )


def value_text(value: Any) -> str:
    """A label, a reward or the like: texts as they are, nothing for None, everything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def visible(text: str) -> str:
    """`text` without characters that a terminal obeys, or cannot show: these are written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
