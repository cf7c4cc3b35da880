"""What happened in a session, in numbers that can be added up over sessions.

Invariants: `turns == extended + forked`; a fork is a leaf more, so a session of `n > 0` turns has `1 + forked` leaves;
`trained_tokens` are the sampled ones of recorded turns, less what the gate asked to be masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Counters:
    """Of one session; `sampled_tokens` include those of abandoned turns, which nothing is trained on."""

    turns: int = 0
    extended: int = 0
    forked: int = 0
    refused: int = 0
    abandoned: int = 0
    sampled_tokens: int = 0
    abandoned_tokens: int = 0
    trained_tokens: int = 0
    retokenised_tokens: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    samples: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Counters:
        """The inverse of `to_dict`; a number that is missing is 0."""
        return cls(**{field.name: int(values.get(field.name, 0)) for field in fields(cls)})
