"""One sequence in the engine: its tokens, where it stands, and who waits for it.

Invariant: `logprobs` is as long as `output_ids`; the first `computed` of `tokens` have their keys and values in the
slots of the table row `row`; a finished sequence has a `finish` and no row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.text import TextStream


@dataclass(eq=False, slots=True)
class Sequence:
    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_new_tokens: int
    notify: Callable[[Sequence], object]
    choice: int = 0
    seed: int = 0  # 64 bits: what its draws depend on
    stream: bool = False
    text: TextStream | None = None  # only where someone reads text before the end: streams and stop strings
    logprob_start: int | None = None
    top_logprobs: int = 0
    routed_from: int | None = None  # the first position whose experts were asked for
    # state
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    routed: list[np.ndarray] = field(
        default_factory=list
    )  # experts of the first positions, as they were first computed
    row: int = -1
    computed: int = 0
    ahead: int = 0  # tokens that were launched and not read yet
    cached_tokens: int = 0
    kv_version: str | None = None  # weights that computed the slots; None once they are mixed
    versions: list[tuple[str, int]] = field(default_factory=list)  # (weight version, first output token under it)
    finish: dict[str, Any] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    finished: float | None = None
    plain: bool = field(init=False)  # only temperature matters to its draws
    _prompt: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._prompt = np.array(self.prompt_ids, dtype=np.int64)  # once: prompts are long, and looked at often
        self.plain = self.params.plain and not self.top_logprobs

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def array(self) -> np.ndarray:
        """`tokens`; not to be written to."""
        return np.concatenate([self._prompt, self.output_ids]) if self.output_ids else self._prompt

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def wants_more(self) -> bool:
        """Whether it needs another token, as far as is known, when those are read that were launched."""
        return self.finish is None and len(self.output_ids) + self.ahead < self.max_new_tokens

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take a sampled token and decide whether the sequence is finished; ValueError when there was none to draw."""
        if logprob != logprob:
            raise ValueError("its logits are not numbers, so that no token could be drawn: look at the weights")
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.output_ids)))
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.end({"type": "stop", "matched": token})
        elif self.text is not None and (matched := self.text.push(token)) is not None:
            self.end({"type": "stop", "matched": matched})
        elif len(self.output_ids) >= self.max_new_tokens:
            self.end({"type": "length", "length": len(self.output_ids)})

    def end(self, reason: dict[str, Any]) -> None:
        self.finish = reason
        self.finished = time.perf_counter()
