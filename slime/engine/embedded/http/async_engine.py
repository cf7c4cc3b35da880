"""Between the event loop and the engine's thread: requests and commands go in, finished sequences and results come out.

Invariant: every accepted request ends exactly once, or its client is gone and the request is aborted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future as ThreadFuture
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.errors import BadRequest, RequestFailed, StaleWeights, TooMany
from slime.engine.embedded.http.json_writer import AnswerWriter
from slime.engine.embedded.http.requests import GenerateRequest, ModelFacts
from slime.engine.embedded.http.responses import Cutter, Piece, TokenJson, final_text
from slime.engine.embedded.scheduler import Sequence

T = TypeVar("T")


@dataclass(frozen=True)
class Finished:
    """A sequence that has ended, and what is written of its tokens, if anything is: perhaps not yet the last ones."""

    request: GenerateRequest
    sequence: Sequence
    written: TokenJson | None


class EngineBridge:
    """The engine as handlers see it; `facts` is None until the model is loaded."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.facts: ModelFacts | None = None
        self.writer = AnswerWriter(lambda: self.loaded.tokenizer)
        self._open = 0

    @property
    def loaded(self) -> ModelFacts:
        assert self.facts is not None
        return self.facts

    async def call(self, function: Callable[[], T], *, meets_steps: bool = False) -> T:
        """Run `function` in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.core.call(function, meets_steps=meets_steps))

    @contextmanager
    def admitted(self, requests: SequenceOf[GenerateRequest]) -> Iterator[None]:
        """The samples of these requests are in the engine while the body runs; refused when they are too many."""
        count = sum(request.params.n for request in requests)
        most, room = self.core.options.max_samples_per_request, self.core.options.max_queued_requests
        if count > most:
            raise BadRequest(f"the request asks for {count} samples, --max-samples-per-request allows {most}", "n")
        if self._open + count > room:
            raise TooMany(
                f"{self._open} samples wait or run here and --max-queued-requests allows {room}: send it again later"
            )
        self._open += count
        try:
            yield
        finally:
            self._open -= count

    async def run(self, request: GenerateRequest, *, writes: bool = True) -> list[Finished]:
        """All samples of a request, finished; a client that goes away aborts them. `writes`: their tokens become JSON
        while they are sampled."""
        loop = asyncio.get_running_loop()
        left = request.params.n
        done = loop.create_future()

        def finished() -> None:
            nonlocal left
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        sequences = request.sequences(self.loaded, lambda _: loop.call_soon_threadsafe(finished))
        written = self.writer.watch(sequences) if writes else [None] * len(sequences)
        try:
            self.core.submit(sequences)
            await done
        except asyncio.CancelledError:
            self._abandon(sequences)
            raise
        finally:
            self.writer.forget(sequences)
        for seq in sequences:
            _raise_failure(seq)
        return [Finished(request, seq, tokens) for seq, tokens in zip(sequences, written, strict=True)]

    async def run_all(self, requests: SequenceOf[GenerateRequest], *, writes: bool = True) -> list[list[Finished]]:
        """All samples of several requests. When one fails the others are aborted, and are out of the engine before the
        failure is raised: nobody would read their answers."""
        running = [asyncio.ensure_future(self.run(request, writes=writes)) for request in requests]
        try:
            return await asyncio.gather(*running)
        except Exception:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.call(lambda: None, meets_steps=True)  # behind their aborts
            raise

    async def answered(self, finished: SequenceOf[Finished], make: Callable[[list[str]], T]) -> T:
        """What `make`, in the thread that writes answers, says of the texts of finished sequences."""
        return await self.writer.make([final_text(each.sequence) for each in finished], make)

    def _abandon(self, sequences: list[Sequence]) -> None:
        self.core.call(lambda: self.core.abort_sequences(sequences, "the client went away"), meets_steps=True)

    async def pieces(self, request: GenerateRequest) -> AsyncIterator[tuple[Sequence, Piece]]:
        """What is new of a streaming request, each `stream_interval` tokens (or --stream-interval) and at the end."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Piece] = asyncio.Queue()
        cutter = Cutter(request.params.stream_interval or self.core.options.stream_interval)

        def notify(seq: Sequence) -> None:
            if (piece := cutter.next(seq)) is not None:
                loop.call_soon_threadsafe(news.put_nowait, piece)

        [seq] = request.sequences(self.loaded, notify)
        self.core.submit([seq])
        sent = 0
        try:
            while True:
                piece = await news.get()
                while not news.empty():
                    piece.join(news.get_nowait())
                if piece.finish is not None:
                    _raise_failure(seq)
                    [text] = await self.writer.make([final_text(seq)], lambda texts: texts)
                    piece.text = text[sent:]
                sent += len(piece.text)
                yield seq, piece
                if piece.finish is not None:
                    return
        finally:
            if seq.finish is None:
                self._abandon([seq])


def _raise_failure(seq: Sequence) -> None:
    if seq.finish is not None and "status_code" in seq.finish:
        kind = StaleWeights if seq.finish["status_code"] == StaleWeights.status else RequestFailed
        raise kind(seq.finish["message"])


def in_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but a process that is told to stop does not wait for it."""
    result: ThreadFuture[T] = ThreadFuture()

    def run() -> None:
        result.set_running_or_notify_cancel()  # from here on whoever waits may go away, but nothing is cancelled
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(result)
