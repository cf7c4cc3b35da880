"""What a session asks of whoever samples for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

OnText = Callable[[str, list[int]], Awaitable[None]]
"""Hears of an answer as it grows: text that is final, and the ids that came with it."""


@dataclass(frozen=True)
class SampledAnswer:
    """What the engines sampled after a prompt: ids and log-probs of one length, and their text.

    `text` lacks the token that ended the turn. `finish_reason` is "stop", "length" or, where the rollout was given up,
    "abort". `meta_info` is the engine's, in the form that `Sample.append_response_tokens` takes, over all requests that
    the answer took.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    text: str
    finish_reason: str
    meta_info: Mapping[str, Any]


class Sampler(Protocol):
    """Samples after token ids. A request that is cut off is continued inside: whoever asks gets one answer."""

    async def sample(
        self,
        ids: np.ndarray,
        params: Mapping[str, Any],
        *,
        affinity: str,
        on_text: OnText | None = None,
        known: int = 0,
    ) -> SampledAnswer:
        """What comes after `ids`, under SGLang's sampling parameters; same affinity, same engine.

        Of the first `known` ids it is known which experts they went to, where that is recorded.
        """
        ...
