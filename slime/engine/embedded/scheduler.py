"""Decides which sequences run in the next step.

Every step is either an extend step (prompt tokens of waiting sequences, at most `chunk` of them, long prompts in
pieces) or a decode step (one token for each running sequence). On a CPU extend steps come first, so that decode steps
are as wide as possible; where steps are launched ahead the two kinds alternate (`Turns`). A sequence whose prompt
shares a prefix with one that is being computed waits for that one, so that the n samples of a prompt compute it once. A
sequence begins only when there are slots for its tokens and for the expected growth of all sequences. If the slots run
out nevertheless, the youngest running sequences are retracted: they release their slots and start over from their
tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from slime.engine.embedded.kv_cache import KVCache, common_prefix_length
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.tokenizer import TextStream
from slime.storage.json_types import JsonObject


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence in the engine: its tokens, its state, and the callback that reports its progress.

    Invariant: `logprobs` is as long as `output_ids`; the first `computed` of `tokens` have their keys and values in the
    slots of the table row `row`; a finished sequence has a `finish` and no row.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_new_tokens: int
    notify: Callable[[Sequence], object]
    choice: int = 0
    seed: int = 0  # 64 bits; determines its random draws
    stream: bool = False
    text: TextStream | None = None  # only where text is needed before the end: streams and stop strings
    logprob_start: int | None = None
    top_logprobs: int = 0
    routed_from: int | None = None  # the first position whose experts are requested
    # state
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)  # experts of the first positions, when first computed
    row: int = -1
    computed: int = 0
    ahead: int = 0  # tokens that were launched and not read yet
    cached_tokens: int = 0
    kv_version: str | None = None  # weights that computed the slots; None if several versions did
    versions: list[tuple[str, int]] = field(default_factory=list)  # (weight version, first output token under it)
    finish: JsonObject | None = None
    arrived: float = field(default_factory=time.perf_counter)
    finished: float | None = None
    plain: bool = field(init=False)  # its draws depend on the temperature only
    _prompt: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._prompt = np.array(self.prompt_ids, dtype=np.int64)  # once: prompts are long and read often
        self.plain = self.params.plain and not self.top_logprobs

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def array(self) -> np.ndarray:
        """`tokens` as a read-only array."""
        return np.concatenate([self._prompt, self.output_ids]) if self.output_ids else self._prompt

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def wants_more(self) -> bool:
        """True if it needs more tokens than those launched, unless one of these turns out to end it."""
        return self.finish is None and len(self.output_ids) + self.ahead < self.max_new_tokens

    def append(self, token: int, logprob: float, version: str) -> None:
        """Append a sampled token and finish the sequence if it ends there; ValueError if the logits were NaN."""
        if logprob != logprob:
            raise ValueError("its logits are not numbers, so no token could be sampled: check the weights")
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

    def end(self, reason: JsonObject) -> None:
        self.finish = reason
        self.finished = time.perf_counter()


_PREFIX_KEY_LENGTH = 16  # only prompts whose first 16 tokens agree are compared
_MIN_SHARED_TOKENS = 8  # shared tokens for which a sequence waits for another's prefill


@dataclass
class Extend:
    """A piece of an extend step: it computes tokens `start:end` of `sequence` into `slots`."""

    sequence: Sequence
    start: int
    end: int
    slots: np.ndarray

    def __post_init__(self) -> None:
        self.scored = len(self.sequence.input_logprobs)  # before this piece
        self.is_complete = self.end == self.sequence.length
        self.is_sampled = self.is_complete and self.sequence.max_new_tokens > 0


@dataclass
class GrowthEstimate:
    """The expected share of the tokens that a sequence may still generate: SGLang's `new_token_ratio`.

    It starts high, decreases with every decode step that finds slots, and is estimated from the generated tokens again
    when sequences were retracted.
    """

    share: float = 0.7
    lowest: float = 0.098
    highest: float = 1.0
    sinks_in: int = 200  # steps from the first share to the lowest; SGLang's 600 leave more slots idle
    spare_steps: int = 20  # decode steps that the free slots suffice for after sequences were retracted
    counted: int = 4096  # upper limit of the tokens that are expected of one sequence

    def __post_init__(self) -> None:
        self._step = (self.share - self.lowest) / self.sinks_in

    def of(self, seq: Sequence) -> float:
        return self.share * min(seq.max_new_tokens - len(seq.output_ids), self.counted)

    def found_room(self) -> None:
        self.share = max(self.lowest, self.share - self._step)

    def ran_out(self, running: list[Sequence]) -> None:
        generated = sum(len(seq.output_ids) + self.spare_steps for seq in running)
        allowed = sum(seq.max_new_tokens for seq in running)
        self.share = min(self.highest, max(self.lowest, generated / max(allowed, 1)))


@dataclass
class StepInterleaver:
    """Alternates extend steps and decode steps where steps are launched ahead.

    Between two decode steps there is at most one extend step, of few prompt tokens. Waiting sequences are admitted in
    groups, so that many small extend steps do not interrupt decoding; while less than half of the rows decode, a
    sequence is admitted at once. Only when more sequences enter than decode (a crowd), extend steps come first, as long
    as they are full: a batch that begins so decodes together to its end.
    """

    mixed_tokens: int = 2048
    rows: int = 16  # waiting sequences that are admitted as one group
    steps: int = 12  # decode steps after which a smaller group is admitted too
    crowd_steps: int = 8  # consecutive extend steps of a crowd while other sequences decode
    _decoded: int = 0  # decode steps since the last extend step
    _extended: int = 0  # extend steps since the last decode step
    _last_tokens: int = 0  # prompt tokens of the last extend step
    _is_crowded: bool = False
    _was_refused: bool = False  # no sequence found slots, and none has left since

    def prompt_tokens(self, s: Scheduler, decoding: int, *, mixes: bool) -> int:
        """Return the largest number of prompt tokens in the next step; 0 for a decode step."""
        entering = len(s.prefilling) + min(len(s.waiting), s.free_rows)
        # A crowd lasts until all of its sequences have entered.
        self._is_crowded = entering > 0 and not self._was_refused and (self._is_crowded or entering > decoding)
        fills_its_steps = self._extended < self.crowd_steps and self._last_tokens >= self.mixed_tokens
        crowd_is_first = self._is_crowded and (self._extended == 0 or fills_its_steps)
        if not (s.waiting or s.prefilling):
            return 0
        if not mixes or decoding == 0 or crowd_is_first:
            return s.chunk
        is_group = decoding < s.max_running // 2 or min(len(s.waiting), s.free_rows) >= self.rows
        admits = self._decoded >= self.steps or (not self._was_refused and is_group)
        if self._decoded == 0 or not (s.prefilling or admits):
            return 0
        return self.mixed_tokens

    def extended(self, tokens: int) -> None:
        """Record an extend step with that many prompt tokens; 0: there was none since no sequence found slots.

        Directly after another extend step, 0 does not mean that slots are missing: sequences that share its prompts
        wait for its end.
        """
        self._decoded, self._last_tokens = 0, tokens
        if tokens:
            self._extended, self._was_refused = self._extended + 1, False
        elif self._extended:
            self._extended = self.crowd_steps
        else:
            self._was_refused = True

    def decoded(self) -> None:
        self._decoded, self._extended = self._decoded + 1, 0

    def made_room(self) -> None:
        self._was_refused = False


class WaitingQueue(OrderedDict[Sequence, None]):
    """Sequences in the order in which they begin; removing one takes constant time at any position."""

    def put_first(self, seq: Sequence) -> None:
        self[seq] = None
        self.move_to_end(seq, last=False)


class Scheduler:
    """The sequences in the engine, by state, with their rows in the slot table; allocates their KV slots."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_running: int,
        context_len: int,
        chunk: int,
        growth: GrowthEstimate | None = None,
    ) -> None:
        self.growth = growth or GrowthEstimate()
        self.retractions = 0
        self.max_running = max_running
        self.chunk = chunk
        self.before_release: Callable[[Sequence, np.ndarray], object] = lambda seq, slots: None
        self.table = np.zeros((max_running + 1, context_len), dtype=np.int32)
        self.reset(cache)

    def reset(self, cache: KVCache) -> None:
        """Start without sequences, with all slots of `cache` free."""
        self.cache = cache
        self.waiting = WaitingQueue()
        self._by_rid: dict[str, dict[Sequence, None]] = {}
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._unshared: list[Sequence] = []  # running sequences whose prompts are not in the prefix tree yet
        self._rows = list(range(self.max_running - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def all(self) -> list[Sequence]:
        return [*self.running, *self.prefilling, *self.waiting]

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Append new sequences to the waiting queue."""
        for seq in sequences:
            self.waiting[seq] = None
            self._by_rid.setdefault(seq.rid, {})[seq] = None

    def of_request(self, rid: str) -> list[Sequence]:
        """Return the sequences of a request that are in the engine."""
        return list(self._by_rid.get(rid, ()))

    @property
    def free_rows(self) -> int:
        return len(self._rows)

    def slots_of(self, seq: Sequence) -> np.ndarray:
        return self.table[seq.row, : seq.computed].astype(np.int64)

    # extend

    def next_extends(self, version: str, budget: int | None = None) -> list[Extend]:
        """Return the pieces of one extend step of `budget` tokens (or `chunk`); empty without free slots for it."""
        budget = self.chunk if budget is None else min(budget, self.chunk)
        extends: list[Extend] = []
        for seq in self.prefilling:
            budget -= self._extend(seq, budget, extends)
        in_flight: dict[tuple[int, ...], list[np.ndarray]] = {}  # prompts being computed, by their first tokens
        for seq in [*self.prefilling, *self._unshared]:
            in_flight.setdefault(tuple(seq.prompt_ids[:_PREFIX_KEY_LENGTH]), []).append(seq.array)
        skipped: list[Sequence] = []
        awaited: set[tuple[int, ...]] = set()  # prompts of sequences that wait for another's prefill
        room = self._expected_free_slots()
        while self.waiting and budget > 0 and self._rows:
            seq = self.waiting.popitem(last=False)[0]
            if self._should_wait(seq, in_flight, awaited):
                skipped.append(seq)
                continue
            unused = self.cache.available
            self._begin(seq, version)
            wanted = unused - self.cache.available + seq.length - seq.computed + self.growth.of(seq)
            used = self._extend(seq, budget, extends) if wanted <= room else 0
            if used == 0:  # no slots: return to the queue
                self._release_slots(seq)
                self.waiting.put_first(seq)
                break
            budget -= used
            self.prefilling.append(seq)
            room = room - wanted if room < float("inf") else self._expected_free_slots()
            in_flight.setdefault(tuple(seq.prompt_ids[:_PREFIX_KEY_LENGTH]), []).append(seq.array)
        for seq in reversed(skipped):
            self.waiting.put_first(seq)
        return extends

    def _should_wait(
        self, seq: Sequence, in_flight: dict[tuple[int, ...], list[np.ndarray]], awaited: set[tuple[int, ...]]
    ) -> bool:
        """True if `seq` should wait until a prompt in flight is computed, to share enough of its prefix."""
        rivals = in_flight.get(tuple(seq.prompt_ids[:_PREFIX_KEY_LENGTH]))
        if not rivals or not self.cache.shares or seq.logprob_start is not None:
            return False
        whole = tuple(seq.prompt_ids)
        if not seq.output_ids and whole in awaited:
            return True
        tokens = seq.array[:-1]
        known = len(self.cache.tree.match(tokens))
        shared = max(common_prefix_length(tokens, other) for other in rivals)
        if shared - known < min(_MIN_SHARED_TOKENS, max(len(tokens) - known, 1)):
            return False
        if not seq.output_ids:
            awaited.add(whole)
        return True

    def _begin(self, seq: Sequence, version: str) -> None:
        """Give a sequence a row, and the slots of its longest cached prefix."""
        seq.row = self._rows.pop()
        tokens = seq.array
        reusable = tokens if seq.logprob_start is None else tokens[: seq.logprob_start + 1]
        slots = self.cache.reuse(reusable) if len(reusable) else np.empty(0, np.int64)
        seq.computed = len(slots)
        seq.cached_tokens = len(slots) if not seq.output_ids else seq.cached_tokens
        seq.kv_version = version
        seq.input_logprobs.clear()
        self.table[seq.row, : len(slots)] = slots

    def _expected_free_slots(self) -> float:
        """Return the slots left after the expected growth of all begun sequences; infinite if there are none."""
        begun = [*self.running, *self.prefilling]
        wanted = sum(seq.length - seq.computed + self.growth.of(seq) for seq in begun)
        return self.cache.available - wanted if begun else float("inf")

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
        """Move `seq` to the running sequences: all of its tokens are computed, or will be after the launched step."""
        self.prefilling.remove(seq)
        self.running.append(seq)
        self._unshared.append(seq)

    def share(self, seq: Sequence) -> None:
        """Add the prompt of a `prefilled` sequence, which is computed now, to the prefix tree.

        A prompt during which the weights changed is not shared.
        """
        if seq in self._unshared:
            self._unshared.remove(seq)
        if seq.row >= 0 and seq.kv_version is not None:
            self.cache.remember(seq.array, self.slots_of(seq))

    def undo_prefilled(self, seq: Sequence) -> None:
        """Undo `prefilled`: the step was not computed."""
        self._unshared.remove(seq)
        self.running.remove(seq)
        self.prefilling.append(seq)

    def undo_extend(self, extend: Extend) -> None:
        """Undo the last piece of a sequence, which was not computed: release its slots."""
        extend.sequence.computed = extend.start
        self.cache.release(extend.slots)

    # decode

    def slots_for(self, count: int) -> np.ndarray | None:
        """Allocate slots for a decode step of `count` sequences; None if too few are free."""
        slots = self.cache.take(count)
        if slots is not None:
            self.growth.found_room()
        return slots

    def next_decode(self) -> np.ndarray | None:
        """Allocate one slot for every running sequence; retracts sequences until the rest fits for some steps."""
        while self.running:
            slots = self.slots_for(len(self.running))
            if slots is not None:
                return slots
            self.retract(self.running[-1])
            while len(self.running) > 1 and self.cache.available < len(self.running) * self.growth.spare_steps:
                self.retract(self.running[-1])
            self.growth.ran_out(self.running)
        return None

    # leaving

    def retract(self, seq: Sequence) -> None:
        """Release the slots of a sequence; it starts over from its tokens when there are slots again."""
        self._leave_queues(seq)
        self._release_slots(seq)
        self.waiting.put_first(seq)
        self.retractions += 1

    def drop(self, seq: Sequence, *, version: str) -> None:
        """Remove a finished or aborted sequence; prefixes that the current weights computed stay in the tree."""
        self.leave(seq)
        if seq.row >= 0:
            if seq.kv_version == version:
                self.cache.remember(seq.array, self.slots_of(seq))
            self._release_slots(seq)

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence from all queues; it keeps its slots."""
        self._leave_queues(seq)
        same_request = self._by_rid.get(seq.rid, {})
        same_request.pop(seq, None)
        if not same_request:
            self._by_rid.pop(seq.rid, None)

    def _leave_queues(self, seq: Sequence) -> None:
        self.waiting.pop(seq, None)
        for queue in (self._unshared, self.running, self.prefilling):
            if seq in queue:
                queue.remove(seq)

    def _release_slots(self, seq: Sequence) -> None:
        slots = self.slots_of(seq)
        self.before_release(seq, slots)
        self.cache.release(slots)
        self._rows.append(seq.row)
        seq.row, seq.computed = -1, 0
