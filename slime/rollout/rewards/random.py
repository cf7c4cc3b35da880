"""`--rm-type random`: 0.0 or 1.0 by coin, to run a pipeline without a verifier."""

from __future__ import annotations

import random


def random_reward() -> float:
    """A fair coin."""
    return float(random.randint(0, 1))
