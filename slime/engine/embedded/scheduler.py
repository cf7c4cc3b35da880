"""Which sequences run next.

Every step is either an extend step (prompt tokens of waiting sequences, at most `chunk` of them, long prompts in
pieces) or a decode step (one token for each running sequence). On a CPU extend steps go first, so that decode steps are
as wide as they can be; where steps are launched ahead they take turns (`Turns`). A sequence whose prompt shares a
prefix with one that is being computed waits for that one, so that the n samples of a prompt compute it once. A sequence
begins only when there are slots for its tokens and for what it and the others are expected to grow by. When the slots
run out all the same, the youngest running sequences give theirs back and start over from their tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.engine.embedded.kv_cache import KVCache
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.tokenizer import TextStream

# One sequence in the engine: its tokens, where it stands, and who waits for it.
#
# Invariant: `logprobs` is as long as `output_ids`; the first `computed` of `tokens` have their keys and values in the
# slots of the table row `row`; a finished sequence has a `finish` and no row.


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


_KEY = 16  # prompts whose first tokens agree are compared further
_WORTH_WAITING = 8  # shared tokens for which a sequence waits for another's prefill


@dataclass
class Extend:
    """Tokens `start:end` of `sequence` are computed in this step; `slots` were taken for them."""

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
    """Which share of the tokens it may still generate a sequence is expected to: SGLang's `new_token_ratio`.

    It begins high, sinks with every decode step that finds room, and is set anew by what the sequences have generated
    when some had to give their slots back.
    """

    share: float = 0.7
    lowest: float = 0.098
    highest: float = 1.0
    sinks_in: int = 200  # steps from the first share to the lowest; SGLang's 600 leave more slots idle
    spare_steps: int = 20  # decode steps that there is room for after sequences gave their slots back
    counted: int = 4096  # tokens of a sequence that are looked ahead at most

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
class Turns:
    """Whose turn it is where prompts are computed between the decode steps of others.

    Between two decode steps there is at most one extend step, of few prompt tokens. Newcomers are let in some at a
    time, so that many small extend steps do not break decoding up; one that comes alone waits for nobody. Only when
    more find a row than decode they go first, as long as they fill their extend steps: a batch that begins so decodes
    together to its end.
    """

    mixed_tokens: int = 2048
    rows: int = 16  # so many newcomers at once are let in
    steps: int = 12  # or those there are, so many decode steps after the last ones
    crowd_steps: int = 8  # extend steps of a crowd that those who decode wait for
    _decoded: int = 0  # steps since the last extend step
    _extended: int = 0  # steps since the last decode step
    _last_tokens: int = 0  # of the last extend step
    _is_crowded: bool = False
    _was_refused: bool = False  # nobody found room, and nobody has left since

    def prompt_tokens(self, s: Scheduler, decoding: int, *, mixes: bool) -> int:
        """Of the next step at most; 0: it is the turn of those who decode."""
        is_first = self._goes_first(s, decoding)
        if not (s.waiting or s.prefilling):
            return 0
        if not mixes or decoding == 0 or is_first:
            return s.chunk
        if self._decoded == 0 or not (s.prefilling or self._lets_in(s, decoding)):
            return 0
        return self.mixed_tokens

    def _goes_first(self, s: Scheduler, decoding: int) -> bool:
        """Whether a crowd does: more find a row than decode, or did, and not all of them are through."""
        entering = len(s.prefilling) + min(len(s.waiting), s.free_rows)
        self._is_crowded = entering > 0 and not self._was_refused and (self._is_crowded or entering > decoding)
        is_on_its_way = self._extended < self.crowd_steps and self._last_tokens >= self.mixed_tokens
        return self._is_crowded and (self._extended == 0 or is_on_its_way)

    def _lets_in(self, s: Scheduler, decoding: int) -> bool:
        if self._decoded >= self.steps:
            return True
        return not self._was_refused and (
            decoding < s.max_running // 2 or min(len(s.waiting), s.free_rows) >= self.rows
        )

    def extended(self, tokens: int) -> None:
        """An extend step of so many was launched; none: it would have been, and nobody found room.

        Right behind another that says little: whoever shares a prompt with that one waits for its end.
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


class WaitingQueue:
    """Sequences in the order in which they begin; one that leaves takes constant time, wherever it stands."""

    def __init__(self) -> None:
        self._members: OrderedDict[Sequence, None] = OrderedDict()

    def append(self, seq: Sequence) -> None:
        self._members[seq] = None

    def appendleft(self, seq: Sequence) -> None:
        self._members[seq] = None
        self._members.move_to_end(seq, last=False)

    def popleft(self) -> Sequence:
        return self._members.popitem(last=False)[0]

    def discard(self, seq: Sequence) -> None:
        self._members.pop(seq, None)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


class Scheduler:
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
        """Nobody is here, and all slots of `cache` are free."""
        self.cache = cache
        self.waiting = WaitingQueue()
        self._by_rid: dict[str, dict[Sequence, None]] = {}
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._unshared: list[Sequence] = []  # they run, and others will share their prompts
        self._rows = list(range(self.max_running - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def all(self) -> list[Sequence]:
        return [*self.running, *self.prefilling, *self.waiting]

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Newcomers, behind all who wait."""
        for seq in sequences:
            self.waiting.append(seq)
            self._by_rid.setdefault(seq.rid, {})[seq] = None

    def of_request(self, rid: str) -> list[Sequence]:
        """The sequences of a request that are here."""
        return list(self._by_rid.get(rid, ()))

    @property
    def free_rows(self) -> int:
        return len(self._rows)

    def slots_of(self, seq: Sequence) -> np.ndarray:
        return self.table[seq.row, : seq.computed].astype(np.int64)

    # extend

    def next_extends(self, version: str, budget: int | None = None) -> list[Extend]:
        """Pieces of prompts for one extend step of `budget` tokens (or `chunk`); empty when there is no room."""
        budget = self.chunk if budget is None else min(budget, self.chunk)
        extends: list[Extend] = []
        for seq in self.prefilling:
            budget -= self._extend(seq, budget, extends)
        in_flight = self._in_flight_prompts()
        skipped: list[Sequence] = []
        awaited: set[tuple[int, ...]] = set()  # prompts of those who wait for another's
        room = self._expected_room()
        while self.waiting and budget > 0 and self._rows:
            seq = self.waiting.popleft()
            if self._better_wait(seq, in_flight, awaited):
                skipped.append(seq)
                continue
            unused = self.cache.available
            self._begin(seq, version)
            wanted = unused - self.cache.available + seq.length - seq.computed + self.growth.of(seq)
            used = self._extend(seq, budget, extends) if wanted <= room else 0
            if used == 0:  # no slots: back to the queue
                self._give_back(seq)
                self.waiting.appendleft(seq)
                break
            budget -= used
            self.prefilling.append(seq)
            room = room - wanted if room < float("inf") else self._expected_room()
            in_flight.setdefault(tuple(seq.prompt_ids[:_KEY]), []).append(seq.array)
        for seq in reversed(skipped):
            self.waiting.appendleft(seq)
        return extends

    def _in_flight_prompts(self) -> dict[tuple[int, ...], list[np.ndarray]]:
        found: dict[tuple[int, ...], list[np.ndarray]] = {}
        for seq in [*self.prefilling, *self._unshared]:
            found.setdefault(tuple(seq.prompt_ids[:_KEY]), []).append(seq.array)
        return found

    def _better_wait(
        self, seq: Sequence, in_flight: dict[tuple[int, ...], list[np.ndarray]], awaited: set[tuple[int, ...]]
    ) -> bool:
        rivals = in_flight.get(tuple(seq.prompt_ids[:_KEY]))
        if not rivals or not self.cache.shares or seq.logprob_start is not None:
            return False
        whole = tuple(seq.prompt_ids)
        if not seq.output_ids and whole in awaited:
            return True
        if not self._shares_enough(seq, rivals):
            return False
        if not seq.output_ids:
            awaited.add(whole)
        return True

    def _shares_enough(self, seq: Sequence, rivals: list[np.ndarray]) -> bool:
        tokens = seq.array[:-1]
        known = len(self.cache.tree.match(tokens))
        shared = max(_common(tokens, other) for other in rivals)
        return shared - known >= min(_WORTH_WAITING, max(len(tokens) - known, 1))

    def _begin(self, seq: Sequence, version: str) -> None:
        seq.row = self._rows.pop()
        tokens = seq.array
        reusable = tokens if seq.logprob_start is None else tokens[: seq.logprob_start + 1]
        slots = self.cache.reuse(reusable) if len(reusable) else np.empty(0, np.int64)
        seq.computed = len(slots)
        seq.cached_tokens = len(slots) if not seq.output_ids else seq.cached_tokens
        seq.kv_version = version
        seq.input_logprobs.clear()
        self.table[seq.row, : len(slots)] = slots

    def _expected_room(self) -> float:
        """Slots that are left when everybody who began has grown as expected; endless where nobody did."""
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
        """All tokens of `seq` are computed, or will be when the next step is: it decodes."""
        self.prefilling.remove(seq)
        self.running.append(seq)
        self._unshared.append(seq)

    def share(self, seq: Sequence) -> None:
        """What `prefilled` promised has come: others may share it, unless the weights changed meanwhile."""
        if seq in self._unshared:
            self._unshared.remove(seq)
        if seq.row >= 0 and seq.kv_version is not None:
            self.cache.remember(seq.array, self.slots_of(seq))

    def not_prefilled(self, seq: Sequence) -> None:
        """It has not come."""
        self._unshared.remove(seq)
        self.running.remove(seq)
        self.prefilling.append(seq)

    def not_extended(self, extend: Extend) -> None:
        """The last piece of a sequence was not computed: its slots are free again."""
        extend.sequence.computed = extend.start
        self.cache.release(extend.slots)

    # decode

    def slots_for(self, count: int) -> np.ndarray | None:
        """New slots for one decode step of so many, if there are."""
        slots = self.cache.take(count)
        if slots is not None:
            self.growth.found_room()
        return slots

    def next_decode(self) -> np.ndarray | None:
        """One new slot for every running sequence; sequences are retracted until they fit, with some steps to spare."""
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
        """Take the slots away; the sequence starts over from its tokens when there is room."""
        self._leave_queues(seq)
        self._give_back(seq)
        self.waiting.appendleft(seq)
        self.retractions += 1

    def drop(self, seq: Sequence, *, version: str) -> None:
        """A finished or aborted sequence leaves; what it computed under the present weights stays shareable."""
        self.leave(seq)
        if seq.row >= 0:
            if seq.kv_version == version:
                self.cache.remember(seq.array, self.slots_of(seq))
            self._give_back(seq)

    def leave(self, seq: Sequence) -> None:
        """It is in no queue any more; its slots are still its own."""
        self._leave_queues(seq)
        same_request = self._by_rid.get(seq.rid, {})
        same_request.pop(seq, None)
        if not same_request:
            self._by_rid.pop(seq.rid, None)

    def _leave_queues(self, seq: Sequence) -> None:
        self.waiting.discard(seq)
        for place in (self._unshared, self.running, self.prefilling):
            if seq in place:
                place.remove(seq)

    def _give_back(self, seq: Sequence) -> None:
        slots = self.slots_of(seq)
        self.before_release(seq, slots)
        self.cache.release(slots)
        self._rows.append(seq.row)
        seq.row, seq.computed = -1, 0


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
