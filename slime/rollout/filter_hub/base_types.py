"""What a dynamic sampling filter answers.

A filter is `f(args, samples) -> DynamicFilterOutput | bool`; `samples` are those of one finished group that did not
fail, fan-outs flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.errors import UserError


@dataclass
class DynamicFilterOutput:
    """Whether to keep a group, why not, and whether to keep it all the same before asking for more prompts."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(
    function: Callable[..., Any] | None, args: Any, samples: Sequence[Sample]
) -> DynamicFilterOutput:
    """The filter's answer as the type above; no filter keeps everything."""
    if function is None:
        return DynamicFilterOutput(keep=True)
    output = function(args, list(samples))
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, bool | np.bool_):
        return DynamicFilterOutput(keep=bool(output))
    raise UserError(
        f"--dynamic-sampling-filter-path {args.dynamic_sampling_filter_path} returned {output!r:.80}: it must return a "
        "bool or a DynamicFilterOutput"
    )
