"""Which sequences run next.

Every step is either an extend step (prompt tokens of waiting sequences, at most `chunk` of them, long prompts in
pieces) or a decode step (one token for each running sequence). Extend steps go first, so that decode steps are as
wide as they can be. A sequence whose prompt shares a prefix with one that is being computed waits for that one, so
that the n samples of a prompt compute it once. When the slots run out, the youngest running sequence gives its slots
back and starts over from its tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from slime.engine.embedded.cache import KVCache
from slime.engine.embedded.sequence import Sequence

_KEY = 16  # prompts whose first tokens agree are compared further
_WORTH_WAITING = 8  # shared tokens for which a sequence waits for another's prefill


@dataclass
class Extend:
    """Tokens `start:end` of `sequence` are computed in this step; `slots` were taken for them."""

    sequence: Sequence
    start: int
    end: int
    slots: np.ndarray


class Scheduler:
    def __init__(self, cache: KVCache, *, max_running: int, context_len: int, chunk: int) -> None:
        self.max_running = max_running
        self.chunk = chunk
        self.table = np.zeros((max_running + 1, context_len), dtype=np.int32)
        self.reset(cache)

    def reset(self, cache: KVCache) -> None:
        """Nobody is here, and all slots of `cache` are free."""
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._rows = list(range(self.max_running - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def all(self) -> list[Sequence]:
        return [*self.running, *self.prefilling, *self.waiting]

    def slots_of(self, seq: Sequence) -> np.ndarray:
        return self.table[seq.row, : seq.computed].astype(np.int64)

    # extend

    def next_extends(self, version: str) -> list[Extend]:
        """Pieces of prompts for one extend step; empty when there is nothing to extend or no room."""
        budget = self.chunk
        extends: list[Extend] = []
        for seq in self.prefilling:
            budget -= self._extend(seq, budget, extends)
        in_flight = self._in_flight_prompts()
        skipped: list[Sequence] = []
        while self.waiting and budget > 0 and self._rows:
            seq = self.waiting.popleft()
            if self._better_wait(seq, in_flight):
                skipped.append(seq)
                continue
            self._begin(seq, version)
            used = self._extend(seq, budget, extends)
            if used == 0:  # no slots: back to the queue
                self._give_back(seq)
                self.waiting.appendleft(seq)
                break
            budget -= used
            self.prefilling.append(seq)
            in_flight.setdefault(tuple(seq.prompt_ids[:_KEY]), []).append(np.asarray(seq.tokens))
        self.waiting.extendleft(reversed(skipped))
        return extends

    def _in_flight_prompts(self) -> dict[tuple[int, ...], list[np.ndarray]]:
        found: dict[tuple[int, ...], list[np.ndarray]] = {}
        for seq in self.prefilling:
            found.setdefault(tuple(seq.prompt_ids[:_KEY]), []).append(np.asarray(seq.tokens))
        return found

    def _better_wait(self, seq: Sequence, in_flight: dict[tuple[int, ...], list[np.ndarray]]) -> bool:
        rivals = in_flight.get(tuple(seq.prompt_ids[:_KEY]))
        if not rivals or seq.logprob_start is not None:
            return False
        tokens = np.asarray(seq.tokens[:-1])
        known = len(self.cache.tree.match(tokens))
        shared = max(_common(tokens, other) for other in rivals)
        return shared - known >= min(_WORTH_WAITING, max(len(tokens) - known, 1))

    def _begin(self, seq: Sequence, version: str) -> None:
        seq.row = self._rows.pop()
        tokens = seq.tokens
        reusable = tokens if seq.logprob_start is None else tokens[: seq.logprob_start + 1]
        slots = self.cache.reuse(reusable) if reusable else np.empty(0, np.int64)
        seq.computed = len(slots)
        seq.cached_tokens = len(slots) if not seq.output_ids else seq.cached_tokens
        seq.kv_version = version
        seq.input_logprobs.clear()
        self.table[seq.row, : len(slots)] = slots

    def _extend(self, seq: Sequence, budget: int, extends: list[Extend]) -> int:
        count = min(seq.length - seq.computed, budget)
        slots = self.cache.take(count) if count > 0 else None
        if slots is None:
            return 0
        self.table[seq.row, seq.computed : seq.computed + count] = slots
        extends.append(Extend(seq, seq.computed, seq.computed + count, slots))
        seq.computed += count
        return count

    def prefilled(self, seq: Sequence) -> None:
        """All tokens of `seq` are computed: others may share them, unless the weights changed meanwhile; it decodes."""
        self.prefilling.remove(seq)
        self.running.append(seq)
        if seq.kv_version is not None:
            self.cache.remember(seq.tokens, self.slots_of(seq))

    # decode

    def next_decode(self) -> np.ndarray | None:
        """One new slot for every running sequence; sequences are retracted until they fit."""
        while self.running:
            slots = self.cache.take(len(self.running))
            if slots is not None:
                return slots
            self.retract(self.running[-1])
        return None

    # leaving

    def retract(self, seq: Sequence) -> None:
        """Take the slots away; the sequence starts over from its tokens when there is room."""
        self._leave(seq)
        self._give_back(seq)
        self.waiting.appendleft(seq)

    def drop(self, seq: Sequence, *, version: str) -> None:
        """A finished or aborted sequence leaves; what it computed under the present weights stays shareable."""
        self._leave(seq)
        if seq.row >= 0:
            if seq.kv_version == version:
                self.cache.remember(seq.tokens, self.slots_of(seq))
            self._give_back(seq)

    def _leave(self, seq: Sequence) -> None:
        for place in (self.running, self.prefilling, self.waiting):
            if seq in place:
                place.remove(seq)
                return

    def _give_back(self, seq: Sequence) -> None:
        self.cache.release(self.slots_of(seq))
        self._rows.append(seq.row)
        seq.row, seq.computed = -1, 0


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
