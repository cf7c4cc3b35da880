"""The key of engines that somebody else runs: from the environment, so that no plan, log or saved config shows it."""

from __future__ import annotations

import os

from slime.config import Config

KEY_VARIABLE = "SLIME_ENGINE_API_KEY"


def engine_key(config: Config) -> str | None:
    """What `--rollout-external-engine-addrs` ask for; engines that the run starts itself ask for none."""
    return (os.environ.get(KEY_VARIABLE) or None) if config.rollout_external_engine_addrs else None


def authorization(key: str | None) -> dict[str, str]:
    """The header that shows a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
