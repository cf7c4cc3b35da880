"""SGLang servers as engines: what this version can say about them.

The rollout speaks SGLang's dialect, but this version starts only the embedded engine. Nothing here imports sglang.
"""

from __future__ import annotations

import importlib.util
from typing import NoReturn

from slime.errors import UserError


def is_installed() -> bool:
    """Whether the sglang package could be imported."""
    return importlib.util.find_spec("sglang") is not None


def refuse() -> NoReturn:
    """The sentence for `--rollout-backend sglang`."""
    raise UserError(
        "--rollout-backend sglang: SGLang servers are not launched by this version yet; use --rollout-backend embedded"
    )


def choose_backend(rollout_backend: str) -> tuple[str, str]:
    """The engine to start for `--rollout-backend`, and why."""
    if rollout_backend == "sglang":
        refuse()
    if rollout_backend == "auto" and is_installed():
        return "embedded", "SGLang is installed, but this version does not launch its servers yet"
    if rollout_backend == "auto":
        return "embedded", "SGLang is not installed"
    return "embedded", "asked for"
