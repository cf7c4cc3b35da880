"""A chat template rendered without loading the tokenizer: what a plan can show of a prompt in milliseconds.

Good for a look only. What a template needs beyond plain Jinja gives None here; generation uses the tokenizer itself.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


def preview_template(
    folder: str | Path, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None, options: dict[str, Any]
) -> str | None:
    """The messages as the folder's chat template writes them; None without a template that renders here."""
    facts = _read_json(Path(folder) / "tokenizer_config.json")
    template = _template(Path(folder), facts)
    if template is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    values = {"messages": list(messages), "tools": tools or None, "add_generation_prompt": True, **options}
    try:
        return environment.from_string(template).render(**_special_tokens(facts), **values)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None


def _template(folder: Path, facts: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = facts.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(facts: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = facts.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
