"""The thread that makes JSON of sequences, beside the event loop and the engine's thread.

What an answer says of each token is written piece by piece while the sequence still runs, so that many answers that end
together, or a very long one, leave little to do at their end. Answers that are due at the same time become text in one
call, which uses all cores and holds no lock of Python's.

Invariant: an answer is made of what its sequence has when it ends; a job that raises fails for whoever waits for it and
for nobody else. Making answers costs time linear in their tokens.
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

from slime.engine.embedded.http.responses import TokenJson
from slime.engine.embedded.scheduler import Sequence as TokenSequence
from slime.engine.embedded.tokenizer import FinalText

T = TypeVar("T")

log = logging.getLogger(__name__)

_PIECE = 128  # tokens that are worth a call of the JSON library
_LOOK_SECONDS = 0.05
_MOST_OF_TIME = 20  # between two looks at the running sequences passes this many times what the last one took
_TOGETHER = 64  # answers that are sent while the next ones are made


class _Job(Generic[T]):
    """Something to make of the texts of some sequences."""

    def __init__(self, wanted: Sequence[FinalText], make: Callable[[list[str]], T]) -> None:
        self.wanted = wanted
        self.make = make
        self.result: Future[T] = Future()

    def run(self, texts: list[str] | None, tokenizer: Any) -> None:
        if not self.result.set_running_or_notify_cancel():
            return  # whoever asked for it is gone
        try:
            found = texts if texts is not None else [wanted.text(tokenizer) for wanted in self.wanted]
            self.result.set_result(self.make(found))
        except Exception as error:  # noqa: BLE001 - it belongs to one answer
            self.result.set_exception(error)


class AnswerWriter:
    """Watches running sequences and makes answers of finished ones; the thread begins with the first of either.

    `tokenizer` is asked for when it is needed.
    """

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        self._tokenizer = tokenizer
        self._jobs: deque[_Job[Any]] = deque()
        self._watched: dict[TokenSequence, TokenJson] = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, sequences: Sequence[TokenSequence]) -> list[TokenJson]:
        """What will have been written of each when it ends."""
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

    async def make(self, wanted: Sequence[FinalText], make: Callable[[list[str]], T]) -> T:
        """What `make` returns for the texts that are wanted, in their order."""
        job = _Job(wanted, make)
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
                self._finish(jobs)
            else:
                began = time.perf_counter()
                self._write(watched)
                pause = max(_LOOK_SECONDS, _MOST_OF_TIME * (time.perf_counter() - began))

    def _write(self, watched: list[tuple[TokenSequence, TokenJson]]) -> None:
        """Go on with the running sequences until an answer is due."""
        for seq, written in watched:
            if len(seq.logprobs) - written.count >= _PIECE:
                written.catch_up(seq)
                time.sleep(0)  # the engine's thread may want to go on
            if self._jobs:
                return

    def _finish(self, jobs: list[_Job[Any]]) -> None:
        for job, texts in zip(jobs, self._texts(jobs), strict=True):
            job.run(texts, self._tokenizer())

    def _texts(self, jobs: list[_Job[Any]]) -> list[list[str] | None]:
        """The texts of each job; None where they are to be made one by one, to see which one it is that fails."""
        try:
            every = [wanted for job in jobs for wanted in job.wanted]
            made = iter(FinalText.together(self._tokenizer(), every))
            return [[next(made) for _ in job.wanted] for job in jobs]
        except Exception as error:  # found again where it belongs
            log.debug("texts could not be made together", exc_info=error)
            return [None] * len(jobs)
