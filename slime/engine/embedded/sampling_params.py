"""The sampling parameters of a request, with SGLang's names, defaults and limits; checked once, on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slime.engine.embedded.errors import BadRequest, IgnoredFields, is_neutral, shown
from slime.storage.json_types import JsonMapping


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[str, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    stream_interval: int | None = None
    custom_params: JsonMapping | None = field(default=None, compare=False)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """True if only the temperature (or the arg-max) matters: the fast path of the sampler."""
        return self.greedy_or_full_support and not self.edits_logits

    @property
    def greedy_or_full_support(self) -> bool:
        return self.greedy or (self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0)

    @property
    def edits_logits(self) -> bool:
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_new_tokens
        )


_FIELDS = {f.name for f in fields(SamplingParams)}
_WITHOUT_EFFECT = {"custom_params", "spaces_between_special_tokens"}
"""Fields for custom logit processors and slow tokenizers, which change neither tokens nor log-probs here."""
_MOST_STOPS = 64
_LONGEST_STOP = 1024  # characters
_INTS = {"max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed", "stream_interval"}
_FLOATS = {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}
_BOOLS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
_LARGEST = 3e38  # slightly below the largest float32
_LARGEST_BIAS = 1e30  # finite when divided by the smallest temperature
_GREEDY_BELOW = 1e-6  # as in SGLang, a lower temperature means the arg-max
_RANGES = {
    "temperature": (0.0, _LARGEST),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 2.0),
    "max_new_tokens": (0, 1 << 31),
    "min_new_tokens": (0, 1 << 31),
    "n": (1, 4096),
    "stream_interval": (1, 1 << 31),
    "top_k": (-1, 1 << 31),
}


def parse_sampling_params(raw: object, *, vocab_size: int, left_out: IgnoredFields | None = None) -> SamplingParams:
    """Parse a request's `sampling_params`; raises `BadRequest` with the invalid name and value.

    Unknown names are ignored, and noted in `left_out`, if their value is neutral or changes no token.
    """
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise BadRequest(f"sampling_params must be an object, not {type(raw).__name__}")
    known = {name: value for name, value in raw.items() if name in _FIELDS}
    for name in sorted(raw.keys() - (_FIELDS - _WITHOUT_EFFECT)):
        if name not in _WITHOUT_EFFECT and not is_neutral(raw[name]):
            raise BadRequest(
                f"unknown sampling parameter {shown(name)}, which may change what is sampled; known are "
                f"{', '.join(sorted(_FIELDS))}",
                name,
            )
        if left_out is not None and not (name in _FIELDS and is_neutral(raw[name])):
            left_out.note(f"sampling_params.{name}")
    params = SamplingParams(**{name: _parse_value(name, v, vocab_size) for name, v in known.items() if v is not None})
    if params.min_new_tokens > params.max_new_tokens:
        raise BadRequest(f"min_new_tokens {params.min_new_tokens} exceeds max_new_tokens {params.max_new_tokens}")
    if params.top_p == 0.0:
        raise BadRequest("top_p must be in (0, 1]")
    stops = params.stop_token_ids
    if params.min_new_tokens and len(stops) >= vocab_size and stops >= set(range(vocab_size)):
        raise BadRequest("min_new_tokens requires tokens, but stop_token_ids has every token of the vocabulary")
    return replace(params, temperature=0.0) if params.temperature < _GREEDY_BELOW else params


def _parse_value(name: str, value: Any, vocab_size: int) -> Any:
    if name in _BOOLS:
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, not {shown(value)}", name)
        return value
    if name in _INTS or name in _FLOATS:
        wanted = int if name in _INTS else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = "an integer" if name in _INTS else "a number"
            raise BadRequest(f"{name} must be {kind}, not {shown(value)}", name)
        low, high = _RANGES.get(name, (float("-inf"), float("inf")))
        if not low <= value <= high:
            raise BadRequest(f"{name} must be between {low} and {high}, not {shown(value)}", name)
        return value
    if name == "stop":
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise BadRequest(f"stop must be a non-empty string or a list of them, not {shown(value)}", name)
        if len(strings) > _MOST_STOPS or max(map(len, strings), default=0) > _LONGEST_STOP:
            raise BadRequest(f"stop holds at most {_MOST_STOPS} strings of at most {_LONGEST_STOP} characters", name)
        return tuple(strings)
    if name == "stop_token_ids":
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise BadRequest(f"stop_token_ids must be a list of token ids, not {shown(value)}", name)
        return frozenset(ids)
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, not {shown(value)}", name)
        for key, bias in value.items():
            text, number = str(key), isinstance(bias, int | float) and not isinstance(bias, bool)
            is_token = text.isascii() and text.isdecimal() and len(text) < 12 and int(text) < vocab_size
            if not is_token or not number or not abs(bias) <= _LARGEST_BIAS:
                raise BadRequest(
                    f"logit_bias entry {shown(key)}: {shown(bias)} is not a token id below {vocab_size} and a number "
                    f"up to {_LARGEST_BIAS:g}",
                    name,
                )
    return value
