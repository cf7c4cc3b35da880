"""Admission and retraction of sequences without a model: tokens are made up, slots are real."""

from __future__ import annotations

import numpy as np

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.executor import StepExecutor
from slime.engine.embedded.kv_cache import KVCache
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import GrowthEstimate, Scheduler, Sequence, StepInterleaver

PROMPT, LIMIT = 64, 512
FULL = StepInterleaver.mixed_tokens  # tokens of an extend step that a crowd fills


class Engine:
    """Runs scheduler steps as the engine does and counts the prefilled tokens."""

    def __init__(self, capacity: int, growth: GrowthEstimate) -> None:
        self.scheduler = Scheduler(
            KVCache(capacity), max_running=64, context_len=PROMPT + LIMIT, chunk=1024, growth=growth
        )
        self.lengths: dict[Sequence, int] = {}
        self.prefilled = self.decode_steps = 0

    def submit(self, prompts: list[list[int]], lengths: list[int]) -> None:
        for prompt, length in zip(prompts, lengths, strict=True):
            seq = Sequence("rid", prompt, SamplingParams(), frozenset(), LIMIT, notify=lambda seq: None)
            self.lengths[seq] = length
            self.scheduler.add([seq])

    def run(self) -> None:
        s = self.scheduler
        while not s.idle:
            if extends := s.next_extends("1"):
                self.prefilled += sum(e.end - e.start for e in extends)
                for seq in [e.sequence for e in extends if e.end == e.sequence.length]:
                    s.prefilled(seq)
                    s.share(seq)
                    self._grow(seq)
            elif s.running:
                self._decode(s.next_decode())
            else:
                assert s.prefilling, "nobody finds room"
                s.retract(s.prefilling[-1])

    def _decode(self, slots: np.ndarray | None) -> None:
        if slots is None:
            return
        self.decode_steps += 1
        for seq, slot in zip(list(self.scheduler.running), slots, strict=True):
            self.scheduler.table[seq.row, seq.computed] = slot
            seq.computed += 1
            self._grow(seq)

    def _grow(self, seq: Sequence) -> None:
        seq.append(7, 0.0, "1")
        if len(seq.output_ids) == self.lengths[seq]:
            seq.end({"type": "stop", "matched": 7})
            self.scheduler.drop(seq, version="1")


def run_workload(growth: GrowthEstimate) -> Engine:
    """Run 200 requests of 64 tokens in a cache of 4,000; they may grow to 576 tokens but mostly stay shorter."""
    generator = np.random.default_rng(0)
    engine = Engine(4000, growth)
    prompts = generator.integers(0, 1000, (200, PROMPT)).tolist()
    engine.submit(prompts, np.minimum(generator.geometric(1 / 200, 200), LIMIT).tolist())
    engine.run()
    assert engine.scheduler.cache.available == 4000
    assert all(len(seq.output_ids) == length for seq, length in engine.lengths.items())
    return engine


def test_growth_reserve_avoids_most_recomputation() -> None:
    without = run_workload(GrowthEstimate(share=0.0, lowest=0.0, highest=0.0, spare_steps=1))
    reserved = run_workload(GrowthEstimate())
    needed = 200 * PROMPT
    assert without.prefilled > 2.5 * needed
    assert reserved.prefilled < 1.2 * needed
    assert reserved.scheduler.retractions < without.scheduler.retractions / 5
    assert reserved.decode_steps < 1.25 * without.decode_steps  # the reserve leaves few slots idle


def test_growth_estimate_falls_with_room_and_rises_without() -> None:
    growth = GrowthEstimate()
    for _ in range(1000):
        growth.found_room()
    assert growth.share == growth.lowest
    running = [
        Sequence("rid", [1], SamplingParams(), frozenset(), 100, notify=lambda seq: None, output_ids=[1] * count)
        for count in (60, 40)
    ]
    growth.ran_out(running)
    assert growth.share == (60 + 20 + 40 + 20) / 200


def test_sequence_starts_alone_despite_its_growth_estimate() -> None:
    engine = Engine(PROMPT + 10, GrowthEstimate())
    engine.submit([list(range(PROMPT))] * 3, [10, 10, 10])
    engine.run()
    assert engine.scheduler.cache.available == PROMPT + 10


def test_evicts_the_tail_of_a_cached_sequence_when_the_cache_is_full() -> None:
    """The tree holds a sequence that fills the cache; the next one shares half of it and needs the other slots."""
    engine = Engine(PROMPT + 9, GrowthEstimate())
    first = list(range(PROMPT))
    engine.submit([first], [10])
    engine.run()
    assert engine.scheduler.cache.pool.free == 0
    engine.submit([first[:32] + [500] * 32], [10])
    engine.run()
    assert engine.prefilled == PROMPT + 32


def queue_of(count: int) -> Scheduler:
    engine = Engine(100_000, GrowthEstimate())
    engine.submit([[1, 2, 3]] * count, [1] * count)
    return engine.scheduler


def test_new_requests_are_admitted_in_groups_and_a_lone_one_at_once() -> None:
    """60 of 64 rows decode: many small extend steps would interrupt them."""
    turns = StepInterleaver()
    turns.extended(FULL)
    waited = 0
    while not turns.prompt_tokens(queue_of(1), 60, mixes=True):
        turns.decoded()
        waited += 1
    assert waited == turns.steps  # a request was admitted just before
    for _ in range(30):
        turns.decoded()
    assert turns.prompt_tokens(queue_of(1), 60, mixes=True) == turns.mixed_tokens  # none was admitted recently: at once
    turns.extended(FULL)
    turns.decoded()
    assert not turns.prompt_tokens(queue_of(turns.rows - 1), 60, mixes=True)
    assert turns.prompt_tokens(queue_of(turns.rows), 60, mixes=True)
    assert turns.prompt_tokens(queue_of(1), 31, mixes=True)  # more than half of the rows are free


def test_extend_steps_alternate_with_decode_steps_when_many_decode() -> None:
    turns, some = StepInterleaver(), queue_of(40)
    assert StepInterleaver().prompt_tokens(some, 0, mixes=True) == some.chunk  # no sequence decodes, so none is delayed
    turns.extended(FULL)
    assert turns.prompt_tokens(some, 40, mixes=True) == 0
    assert turns.prompt_tokens(some, 40, mixes=False) == some.chunk  # without mixing, as on the CPU
    turns.decoded()
    assert turns.prompt_tokens(some, 40, mixes=True) == turns.mixed_tokens


def test_crowd_is_prefilled_before_decoding_continues() -> None:
    """More requests arrive than decode: all are prefilled first, then decode together."""
    turns, crowd = StepInterleaver(), queue_of(40)
    turns.extended(FULL)
    assert turns.prompt_tokens(crowd, 8, mixes=True) == crowd.chunk
    turns.extended(FULL)
    assert turns.prompt_tokens(queue_of(4), 44, mixes=True) == crowd.chunk  # including the last of the crowd
    turns.extended(FULL)
    assert not turns.prompt_tokens(queue_of(0), 48, mixes=True)
    assert not turns.prompt_tokens(queue_of(4), 48, mixes=True)  # later requests are not part of the crowd
    turns.decoded()
    assert turns.prompt_tokens(queue_of(turns.rows), 48, mixes=True) == turns.mixed_tokens


def test_crowd_delays_decoding_for_crowd_steps_at_most() -> None:
    turns, crowd = StepInterleaver(), queue_of(64)
    taken = 0
    while turns.prompt_tokens(crowd, 8, mixes=True):
        turns.extended(FULL)
        taken += 1
    assert taken == turns.crowd_steps
    turns.decoded()
    assert turns.prompt_tokens(crowd, 8, mixes=True) == crowd.chunk


def test_slowly_arriving_crowd_alternates_with_decoding() -> None:
    """Extend steps with few prompt tokens would delay decoding without gain."""
    turns, crowd = StepInterleaver(), queue_of(40)
    turns.extended(FULL - 1)
    assert turns.prompt_tokens(crowd, 8, mixes=True) == 0
    turns.decoded()
    assert turns.prompt_tokens(crowd, 8, mixes=True) == crowd.chunk


def test_requests_without_a_free_row_do_not_form_a_crowd() -> None:
    turns, many = StepInterleaver(), queue_of(200)
    many._rows = many._rows[:10]
    turns.decoded()
    assert turns.prompt_tokens(many, 54, mixes=True) == 0  # ten rows are not a crowd and too few to admit


def test_empty_extend_step_delays_a_crowd_by_one_decode_step() -> None:
    """Samples of one prompt wait until the first has computed it: an empty extend step does not mean a lack of room."""
    turns, crowd = StepInterleaver(), queue_of(40)
    turns.extended(FULL)
    assert turns.prompt_tokens(crowd, 1, mixes=True) == crowd.chunk
    turns.extended(0)
    assert turns.prompt_tokens(crowd, 1, mixes=True) == 0
    turns.decoded()
    assert turns.prompt_tokens(crowd, 1, mixes=True) == crowd.chunk


def test_prefill_without_room_is_retried_only_after_room_is_made() -> None:
    turns, crowd = StepInterleaver(), queue_of(40)
    turns.extended(0)
    turns.decoded()
    assert not turns.prompt_tokens(crowd, 20, mixes=True)
    turns.made_room()
    assert turns.prompt_tokens(crowd, 20, mixes=True)


def test_abort_cost_is_linear_in_the_aborted_sequences() -> None:
    compared = 0

    class Watched(Sequence):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    core = EngineCore(parse_options(["--model-path", "m"]), on_death=print)
    core.scheduler = Scheduler(KVCache(64), max_running=8, context_len=8, chunk=8)
    core.steps = StepExecutor(core.scheduler, None, version="1")  # type: ignore[arg-type]
    told: list[Sequence] = []
    count, of_each = 4096, 2
    core.submit(
        [
            Watched(Name(f"{at // of_each}"), [5], SamplingParams(), frozenset(), 4, notify=told.append)
            for at in range(count)
        ]
    )
    core._inbox.get().run()
    aborted = [at for at in range(count // of_each) if at % 8 == 3]
    assert [core.abort(Name(f"{at}")) for at in aborted] == [of_each] * len(aborted)
    core.steps.settle()
    assert sorted({int(seq.rid) for seq in told}) == aborted
    assert [core.abort(f"{at}") for at in aborted[:3]] == [0, 0, 0]
    assert [int(seq.rid) for seq in core.scheduler.all()[::of_each]] == [at for at in range(2048) if at % 8 != 3]
    assert compared < 10 * len(aborted) * of_each
    core.abort_all()
    core.steps.settle()
    assert (core.scheduler.idle, len(told), core.scheduler._by_rid) == (True, count, {})


def test_retracted_sequence_is_still_found_by_request_id() -> None:
    scheduler = Scheduler(KVCache(64), max_running=8, context_len=8, chunk=8)
    first, second = (Sequence(rid, [5, 6], SamplingParams(), frozenset(), 4, notify=print) for rid in "ab")
    scheduler.add([first, second])
    for extend in scheduler.next_extends("1"):
        scheduler.prefilled(extend.sequence)
    scheduler.retract(second)
    assert scheduler.of_request("b") == list(scheduler.waiting) == [second]
    scheduler.leave(second)
    assert (scheduler.of_request("b"), scheduler.of_request("a")) == ([], [first])
