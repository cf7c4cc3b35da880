"""Random scheduler steps without a model: every token depends on all tokens before it.

Requests arrive, end, are aborted or fail at random. The decoder keeps a token in every slot and the last token of every
row. The next token is a hash of all tokens in a sequence's slots, so a wrong, lost or overwritten slot changes it.
"""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.engine.embedded.executor import StepExecutor
from slime.engine.embedded.kv_cache import KVCache
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Extend, Scheduler, Sequence

VOCAB, STOP = 50, 7


def following(tokens: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64).tobytes()) % VOCAB


class HashDecoder:
    """A decoder with lookahead; fails at random at launch or collect, and always with a `cursed` sequence."""

    looks_ahead = True

    def __init__(self, scheduler: Scheduler, rng: random.Random, failures: float) -> None:
        self._table, self._rng, self._failures = scheduler.table, rng, failures
        self._kept = np.full(scheduler.cache.pool.capacity + 1, -1)
        self._last = np.full(scheduler.max_running, -1)
        self._in_flight: list[np.ndarray] = []  # slots of steps in flight
        self.cursed: set[Sequence] = set()

    def _may_fail(self, sequences: list[Sequence]) -> None:
        if self.cursed & set(sequences) or (len(sequences) > 1 and self._rng.random() < self._failures):
            raise ArithmeticError("on purpose")

    def launch(self, running: list[Sequence], slots: np.ndarray, ahead: list[int]) -> Any:
        self._may_fail(running)
        self._in_flight.append(slots)
        drawn = []
        for seq, slot, more in zip(running, slots, ahead, strict=True):
            assert seq.plain or not more
            n = seq.length + more
            last = self._last[seq.row] if more else seq.tokens[-1]
            self._table[seq.row, n - 1], self._kept[slot] = slot, last
            drawn.append(self._draw(seq, n))
        return running, drawn, slots

    def launch_extend(self, extends: list[Extend]) -> Any:
        self._may_fail([e.sequence for e in extends])
        for e in extends:
            self._kept[e.slots] = e.sequence.array[e.start : e.end]
        sampled = [e for e in extends if e.is_sampled]
        self._in_flight.append(np.concatenate([e.slots for e in extends]))
        drawn = [self._draw(e.sequence, e.end) for e in sampled]
        return [e.sequence for e in extends], drawn, self._in_flight[-1]

    def _draw(self, seq: Sequence, n: int) -> int:
        held = self._kept[self._table[seq.row, :n]]
        assert held[: seq.length].tolist() == seq.tokens[:n]
        self._last[seq.row] = following(held)
        return int(self._last[seq.row])

    def collect(self, launched: Any) -> Any:
        """Collect a step; a failure also clears the slots of the steps in flight on top of it."""
        sequences, drawn, slots = launched
        assert slots is self._in_flight[0]
        try:
            self._may_fail(sequences)
        except ArithmeticError:
            self._kept[np.concatenate(self._in_flight)] = -1
            self._in_flight.clear()
            raise
        self._in_flight.pop(0)
        return drawn, [0.0] * len(drawn)

    def foresees(self, seq: Sequence) -> bool:
        return False  # called for non-plain sequences only

    def capture_next(self) -> bool:
        return False


def expected(seq: Sequence) -> list[int]:
    tokens = list(seq.prompt_ids)
    while len(tokens) - len(seq.prompt_ids) < seq.max_new_tokens:
        tokens.append(following(np.array(tokens)))
        if tokens[-1] in seq.stop_ids:
            break
    return tokens[len(seq.prompt_ids) :]


class Engine:
    def __init__(self, seed: int, *, ahead: bool) -> None:
        self.rng = rng = random.Random(seed)
        capacity = rng.choice([70, 120, 1000])
        self.scheduler = Scheduler(
            KVCache(capacity), max_running=rng.choice([2, 5, 12]), context_len=70, chunk=rng.choice([7, 30, 200])
        )
        self.decoder = HashDecoder(self.scheduler, rng, failures=rng.choice([0.0, 0.03, 0.2]))
        self.decoder.looks_ahead = ahead
        runner: Any = SimpleNamespace(cuda=False, context=SimpleNamespace(window=SimpleNamespace(forget=lambda: None)))
        self.steps = StepExecutor(self.scheduler, runner, version="1")
        self.steps.decoder = self.decoder
        self.steps._turns.mixed_tokens = rng.choice([3, 20])
        self.everyone: list[Sequence] = []
        self.told: list[Sequence] = []

    def come(self) -> None:
        rng = self.rng
        shared = [rng.choice([1, 2]) for _ in range(rng.choice([1, 20]))]
        prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))]
        params = SamplingParams() if rng.random() < 0.8 else SamplingParams(top_p=0.5)
        limit = rng.choice([0, 1, 2, 5, 18])
        stops = frozenset({STOP}) if rng.random() < 0.5 else frozenset()
        seq = Sequence("rid", prompt, params, stops, limit, notify=self.told.append)
        self.everyone.append(seq)
        self.scheduler.waiting[seq] = None
        if rng.random() < 0.03:
            self.decoder.cursed.add(seq)

    def something_happens(self) -> None:
        here, chance = self.scheduler.all(), self.rng.random()
        if chance < 0.25:
            self.come()
        elif chance < 0.3 and here:
            seq = self.rng.choice(here)
            seq.end({"type": "abort", "message": "enough"})
            self.steps.leave(seq)
        elif chance < 0.33:
            self.steps.quiesce()
            self.scheduler.cache.tree.clear()
        elif chance < 0.35:
            self.steps.quiesce()
            for seq in reversed([*self.scheduler.running, *self.scheduler.prefilling]):
                self.scheduler.retract(seq)

    def run(self) -> None:
        for _ in range(150):
            self.something_happens()
            if not self.scheduler.idle:
                self.steps.step()
        while not self.scheduler.idle:
            self.steps.step()
        self.steps.quiesce()


@pytest.mark.parametrize("ahead", [False, True])
def test_random_steps_give_expected_tokens_and_free_all_slots(ahead: bool) -> None:
    kinds = set()
    for seed in range(60):
        engine = Engine(seed, ahead=ahead)
        engine.run()
        for seq in engine.everyone:
            assert seq.finish is not None, seed
            assert engine.told.count(seq) == 1
            kinds.add(seq.finish["type"] if "status_code" not in seq.finish else "failed")
            want = expected(seq)
            is_whole = seq.finish["type"] != "abort"
            assert seq.output_ids == (want if is_whole else want[: len(seq.output_ids)]), seed
            assert ("status_code" in seq.finish) <= (seq in engine.decoder.cursed)
            assert (seq.row, seq.ahead) == (-1, 0)
        s = engine.scheduler
        s.cache.tree.clear()
        assert s.cache.pool.free == s.cache.pool.capacity, seed
        assert s.free_rows == s.max_running
        assert s.cache.pool.users.sum() == 0
    assert kinds == {"stop", "length", "abort", "failed"}
