"""What samples hold, field by field: each of them is looked at once, since most of the time goes into getting there.

Invariant: columns are as the samples hold them (`slime.data.columns`): a `Packed`, a list or None, not to be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Self

from slime.data.sample import Sample


@dataclass(frozen=True)
class Held:
    """Of each field that training asks for a tuple, in the order of the samples."""

    tokens: tuple[Any, ...] = ()
    loss_mask: tuple[Any, ...] = ()
    rollout_log_probs: tuple[Any, ...] = ()
    teacher_log_probs: tuple[Any, ...] = ()
    status: tuple[Any, ...] = ()
    reward: tuple[Any, ...] = ()
    response_length: tuple[int, ...] = ()
    remove_sample: tuple[bool, ...] = ()
    index: tuple[int | None, ...] = ()
    group_index: tuple[int | None, ...] = ()
    rollout_id: tuple[int | None, ...] = ()
    train_metadata: tuple[dict[str, Any] | None, ...] = ()

    @classmethod
    def by(cls, samples: Sequence[Sample]) -> Self:
        return cls(*zip(*[_FIELDS(vars(sample)) for sample in samples], strict=True))


_FIELDS = itemgetter(*(field.name for field in fields(Held)))
