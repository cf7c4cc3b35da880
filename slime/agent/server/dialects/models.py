"""`/v1/models`, in the words of OpenAI and of Anthropic at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_BORN = 1_700_000_000


def model_body(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": _BORN,
        "created_at": "2023-11-14T22:13:20Z",
        "owned_by": "slime",
        "display_name": name,
    }


def models_body(names: Iterable[str]) -> dict[str, Any]:
    models = [model_body(name) for name in names]
    ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"object": "list", "data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
