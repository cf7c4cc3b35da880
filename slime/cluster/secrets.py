"""Which of the driver's environment its children get: all of it, but for what looks like a secret.

Engines and trainers run the code of models and of the user's losses, and their logs and crashes are shown around; none
of them needs the keys to other services, which the driver keeps for trackers, rewards and tools.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_SECRET = re.compile(
    r"(^|_)(TOKENS?|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)?_?KEYS?|PAT|PWD|CREDENTIALS?|AUTH_SOCK)$"
    r"|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|^AWS_",
    re.IGNORECASE,
)
ENGINE_KEY_VARIABLE = "SLIME_ENGINE_API_KEY"
"""The key of engines: what a run shows to them, and what an engine asks for that has none on its command line."""
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})


def is_secret(name: str) -> bool:
    """Whether the name of an environment variable says that its value is a secret."""
    return name not in _NO_SECRETS and _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str], *, passed: Collection[str] = ()) -> dict[str, str]:
    """The environment without what looks like a secret, but with the names in `passed`."""
    return {name: value for name, value in environment.items() if name in passed or not is_secret(name)}
