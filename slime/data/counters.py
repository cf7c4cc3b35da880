"""Counters a sample accumulates over its engine calls. They only ever grow, by one `add` per finished call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import itemgetter
from typing import Any

import numpy as np


@dataclass
class SpecInfo:
    """Speculative decoding: how many drafted tokens were proposed, accepted and verified."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted share of the drafted tokens; 0 when nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens produced per verification step; 0 when there was none."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add one engine call with speculative decoding."""
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num") or 0)
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num") or 0)
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct") or 0)
        self.completion_token_num += int(meta_info.get("completion_tokens") or 0)

    def __deepcopy__(self, _memo: dict[int, Any]) -> SpecInfo:
        return replace(self)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> SpecInfo:
        """The counts under their names; those that are missing are 0, other names are left out."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})


@dataclass
class PrefixCacheInfo:
    """Prompt tokens sent to the engine, and how many of them its prefix cache already held."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached share of all prompt tokens; 0 before the first call."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add one engine call."""
        self.cached_tokens += int(meta_info.get("cached_tokens") or 0)
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens") or 0)

    def __deepcopy__(self, _memo: dict[int, Any]) -> PrefixCacheInfo:
        return replace(self)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> PrefixCacheInfo:
        """The counts under their names; those that are missing are 0, other names are left out."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})


# Which weights sampled which tokens of a response, as runs `[version, count]`.
#
# Invariant: the counts of a sample's runs add up to its response length; tokens that no engine sampled, or of which
# nobody knows the version, have version None. Neighbouring runs differ.

Spans = list[list[Any]]
"""Runs `[version or None, number of tokens]`, as plain JSON values."""


def grown_spans(spans: Spans, known: int, count: int, meta_info: Mapping[str, Any], *, sampled: bool) -> Spans:
    """The runs after `count` more tokens; `known` is the length of the response so far.

    An engine whose weights changed under a request says so with `weight_versions` (`version`, `start`, `end`). One that
    cannot say so is taken to have sampled everything with the version the request began with.
    """
    grown = list(spans)
    _extend(grown, None, known - sum(map(itemgetter(1), grown)))
    if not sampled:
        _extend(grown, None, count)
        return grown
    told = 0
    for part in meta_info.get("weight_versions") or ():
        length = min(int(part["end"]), count) - told
        _extend(grown, str(part["version"]), length)
        told += max(0, length)
    version = meta_info.get("first_weight_version", meta_info.get("weight_version"))
    _extend(grown, None if version is None else str(version), count - told)
    return grown


def oldest_version(spans: Spans, mask: Sequence[int] | np.ndarray | None, calls: Sequence[str]) -> int | None:
    """The oldest version that sampled a token which is trained on; None when there is none or it is no number.

    Where the runs say nothing about a trained token, the versions of the engine calls do.
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


def _extend(spans: Spans, version: str | None, count: int) -> None:
    if count <= 0:
        return
    """One more run, or a longer last one; the runs themselves are shared with others and stay as they are."""
    if spans and spans[-1][0] == version:
        spans[-1] = [version, spans[-1][1] + count]
    else:
        spans.append([version, count])
