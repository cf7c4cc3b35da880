"""A thread that writes the JSON of sequences, in addition to the event loop and the engine's thread.

The JSON of the tokens is written in pieces while a sequence still runs, so that many answers that end together, or a
very long one, leave little work for their end. Answers that are due at the same time are decoded in one call, which
uses all cores and releases the GIL.

Invariant: an answer has what its sequence has when it ends; a job that raises fails only for its own waiter. Writing
answers takes time linear in their tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from slime.engine.embedded.http.responses import TokenJson, final_text
from slime.engine.embedded.scheduler import Sequence as TokenSequence
from slime.engine.embedded.tokenizer import EngineTokenizer, FinalText

T = TypeVar("T")

log = logging.getLogger(__name__)

_PIECE = 128  # tokens that are worth a call of the JSON library
_LOOK_SECONDS = 0.05
_MOST_OF_TIME = 20  # the pause between two passes over the running sequences, in durations of the last pass
_TOGETHER = 64  # answers that are sent while the next ones are written


class _AnswerJob(Generic[T]):
    """A call of `make` with the texts of some sequences, and its result."""

    def __init__(self, wanted: Sequence[FinalText], make: Callable[[list[str]], T]) -> None:
        self.wanted = wanted
        self.make = make
        self.result: Future[T] = Future()

    def run(self, texts: list[str] | None, tokenizer: EngineTokenizer) -> None:
        if not self.result.set_running_or_notify_cancel():
            return  # the waiter cancelled it
        try:
            found = texts if texts is not None else [wanted.text(tokenizer) for wanted in self.wanted]
            self.result.set_result(self.make(found))
        except Exception as error:  # noqa: BLE001 - it belongs to one answer
            self.result.set_exception(error)


_AnyJob = _AnswerJob[Any]


class AnswerWriter:
    """Writes JSON of running sequences and answers of finished ones; its thread starts with the first of either.

    `tokenizer` is called when the tokenizer is needed.
    """

    def __init__(self, tokenizer: Callable[[], EngineTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._jobs: deque[_AnyJob] = deque()
        self._watched: dict[TokenSequence, TokenJson] = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, sequences: Sequence[TokenSequence]) -> list[TokenJson]:
        """Write the JSON of these sequences while they run; returns the growing JSON of each."""
        growing = [TokenJson() for _ in sequences]
        with self._news:
            was_idle = not self._watched
            self._watched.update(zip(sequences, growing, strict=True))
            self._begin(wake=was_idle)
        return growing

    def forget(self, sequences: Sequence[TokenSequence]) -> None:
        with self._news:
            for seq in sequences:
                self._watched.pop(seq, None)

    async def make(self, finished: Sequence[TokenSequence], make: Callable[[list[str]], T]) -> T:
        """Call `make` with the texts of finished sequences, in the writer's thread; returns its result."""
        job = _AnswerJob([final_text(seq) for seq in finished], make)
        with self._news:
            self._jobs.append(job)
            self._begin(wake=True)
        return await asyncio.wrap_future(job.result)

    def _begin(self, *, wake: bool) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
            self._thread.start()
        elif wake:
            self._news.notify()

    def _run(self) -> None:
        pause = _LOOK_SECONDS
        while True:
            with self._news:
                if not self._jobs:
                    self._news.wait(pause if self._watched else None)
                jobs = [self._jobs.popleft() for _ in range(min(_TOGETHER, len(self._jobs)))]
                watched = [] if jobs else list(self._watched.items())
            if not jobs:
                began = time.perf_counter()
                for seq, written in watched:  # write their new tokens until an answer is due
                    if len(seq.logprobs) - written.count >= _PIECE:
                        written.catch_up(seq)
                        time.sleep(0)  # let the engine's thread run
                    if self._jobs:
                        break
                pause = max(_LOOK_SECONDS, _MOST_OF_TIME * (time.perf_counter() - began))
                continue
            tokenizer = self._tokenizer()
            texts: list[list[str] | None]
            try:
                made = iter(FinalText.together(tokenizer, [wanted for job in jobs for wanted in job.wanted]))
                texts = [[next(made) for _ in job.wanted] for job in jobs]
            except Exception as error:  # each job decodes its own texts, so that only a bad one fails
                log.debug("texts could not be decoded together", exc_info=error)
                texts = [None] * len(jobs)
            for job, own in zip(jobs, texts, strict=True):
                job.run(own, tokenizer)
