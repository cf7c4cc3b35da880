"""Counters a sample accumulates over its engine calls. They only ever grow, by one `add` per finished call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


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
