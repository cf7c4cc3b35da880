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
            if jobs:
                for job, texts in zip(jobs, self._texts(jobs), strict=True):
                    job.run(texts, self._tokenizer())
            else:
                began = time.perf_counter()
                self._write(watched)
                pause = max(_LOOK_SECONDS, _MOST_OF_TIME * (time.perf_counter() - began))

    def _write(self, watched: list[tuple[TokenSequence, TokenJson]]) -> None:
        """Write new tokens of the running sequences until an answer is due."""
        for seq, written in watched:
            if len(seq.logprobs) - written.count >= _PIECE:
                written.catch_up(seq)
                time.sleep(0)  # let the engine's thread run
            if self._jobs:
                return

    def _texts(self, jobs: list[_AnyJob]) -> list[list[str] | None]:
        """Decode the texts of each job; None if that failed: each job then decodes its own, so only a bad one fails."""
        try:
            every = [wanted for job in jobs for wanted in job.wanted]
            made = iter(FinalText.together(self._tokenizer(), every))
            return [[next(made) for _ in job.wanted] for job in jobs]
        except Exception as error:  # raised again by the job that it belongs to
            log.debug("texts could not be decoded together", exc_info=error)
            return [None] * len(jobs)
