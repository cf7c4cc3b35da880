"""Counters that a sample accumulates over its engine calls, and the weight versions that sampled its tokens.

Invariants: counters only grow, by one `add` per finished call. The counts of a sample's version runs sum to its
response length; tokens that no engine sampled, or whose version is unknown, have version None. Neighbouring runs
differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import itemgetter
from typing import Any, Self

import numpy as np

from slime.storage.json_types import JsonMapping


@dataclass
class _Counters:
    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        return replace(self)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        """Build from counts by name; missing counts are 0, unknown names are ignored."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})


@dataclass
class SpecInfo(_Counters):
    """Counts of speculative decoding: drafted and accepted tokens, verification steps."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted fraction of the drafted tokens; 0 when nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification step; 0 without any step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: JsonMapping) -> None:
        """Add one engine call with speculative decoding."""
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num") or 0)
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num") or 0)
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct") or 0)
        self.completion_token_num += int(meta_info.get("completion_tokens") or 0)


@dataclass
class PrefixCacheInfo(_Counters):
    """Prompt tokens sent to the engine, and how many of them were prefix-cache hits."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached fraction of all prompt tokens; 0 before the first call."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: JsonMapping) -> None:
        """Add one engine call."""
        self.cached_tokens += int(meta_info.get("cached_tokens") or 0)
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens") or 0)


VersionRuns = list[list[Any]]
"""Runs `[version or None, number of tokens]` of a response, as plain JSON values."""


def extend_version_runs(
    spans: VersionRuns, known: int, count: int, meta_info: JsonMapping, *, sampled: bool
) -> VersionRuns:
    """Return the runs after `count` more tokens; `known` is the length of the response so far.

    An engine whose weights changed during a request reports `weight_versions` (`version`, `start`, `end`). Without that
    field, all tokens count as sampled with the version at the start of the request.
    """
    grown = list(spans)
    _extend(grown, None, known - sum(map(itemgetter(1), grown)))
    if not sampled:
        _extend(grown, None, count)
        return grown
    covered = 0
    for part in meta_info.get("weight_versions") or ():
        length = min(int(part["end"]), count) - covered
        _extend(grown, str(part["version"]), length)
        covered += max(0, length)
    version = meta_info.get("first_weight_version", meta_info.get("weight_version"))
    _extend(grown, None if version is None else str(version), count - covered)
    return grown


def oldest_version(spans: VersionRuns, mask: Sequence[int] | np.ndarray | None, calls: Sequence[str]) -> int | None:
    """Return the oldest numeric version that sampled a trained token; None if there is none.

    The versions of the engine calls (`calls`) count too when the version of a trained token is unknown.
    """
    oldest: list[int] = []
    trained = None if mask is None else np.asarray(mask)
    position, unknown = 0, not spans
    for version, length in spans:
        if trained is None or trained[position : position + length].any():
            if version is None:
                unknown = True
            elif version.lstrip("-").isdigit():
                oldest.append(int(version))
        position += length
    if unknown:
        oldest += [int(version) for version in calls if version.lstrip("-").isdigit()]
    return min(oldest, default=None)


def _extend(spans: VersionRuns, version: str | None, count: int) -> None:
    """Append a run, or extend the last one; run objects are shared with other lists and never modified."""
    if count <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1] = [version, spans[-1][1] + count]
    else:
        spans.append([version, count])
