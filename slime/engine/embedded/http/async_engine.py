"""Connects the event loop to the engine's thread: submits requests and commands, awaits sequences and results.

Invariant: every accepted request ends exactly once, or is aborted because its client disconnected.
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
from slime.engine.embedded.errors import BadRequest, RequestFailed, StaleWeights, TooManySamples
from slime.engine.embedded.http.json_writer import AnswerWriter
from slime.engine.embedded.http.requests import GenerateRequest, ModelFacts
from slime.engine.embedded.http.responses import OutputPiece, OutputSplitter, TokenJson
from slime.engine.embedded.scheduler import Sequence

T = TypeVar("T")


@dataclass(frozen=True)
class FinishedSequence:
    """A finished sequence, and the JSON of its tokens if it is written; the last tokens may still be missing there."""

    request: GenerateRequest
    sequence: Sequence
    written: TokenJson | None


class EngineBridge:
    """The engine's interface for request handlers; `facts` is None until the model is loaded."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.facts: ModelFacts | None = None
        self.writer = AnswerWriter(lambda: self.loaded.tokenizer)
        self._open = 0

    @property
    def loaded(self) -> ModelFacts:
        assert self.facts is not None
        return self.facts

    @contextmanager
    def admitted(self, requests: SequenceOf[GenerateRequest]) -> Iterator[None]:
        """Count the samples of these requests as admitted while the body runs; refuse them above the limits."""
        count = sum(request.params.n for request in requests)
        most, room = self.core.options.max_samples_per_request, self.core.options.max_queued_requests
        if count > most:
            raise BadRequest(f"the request has {count} samples, --max-samples-per-request allows {most}", "n")
        if self._open + count > room:
            raise TooManySamples(
                f"{self._open} samples wait or run here and --max-queued-requests allows {room}: retry later"
            )
        self._open += count
        try:
            yield
        finally:
            self._open -= count

    async def run(self, requests: SequenceOf[GenerateRequest], *, writes: bool = True) -> list[FinishedSequence]:
        """Generate all samples of the requests; cancelling aborts them. `writes`: write JSON while tokens are sampled.

        If a sample fails, the others are aborted, and have left the engine before the exception is raised.
        """
        loop = asyncio.get_running_loop()
        left = sum(request.params.n for request in requests)
        ended = loop.create_future()

        def finished(seq: Sequence) -> None:
            nonlocal left
            left -= 1
            if (left == 0 or _failure(seq) is not None) and not ended.done():
                ended.set_result(None)

        def notify(seq: Sequence) -> None:
            loop.call_soon_threadsafe(finished, seq)

        samples = [(request, seq) for request in requests for seq in request.sequences(self.loaded, notify)]
        sequences = [seq for _, seq in samples]
        written = self.writer.watch(sequences) if writes else [None] * len(sequences)
        try:
            self.core.submit(sequences)
            await ended
        except asyncio.CancelledError:
            self._abandon(sequences)
            raise
        finally:
            self.writer.forget(sequences)
        if failed := [failure for seq in sequences if (failure := _failure(seq)) is not None]:
            await asyncio.wrap_future(self._abandon(sequences))
            raise failed[0]
        return [FinishedSequence(*sample, tokens) for sample, tokens in zip(samples, written, strict=True)]

    def _abandon(self, sequences: list[Sequence]) -> ThreadFuture[int]:
        return self.core.call(lambda: self.core.abort_sequences(sequences, "the client went away"), meets_steps=True)

    async def pieces(self, request: GenerateRequest) -> AsyncIterator[tuple[Sequence, OutputPiece]]:
        """Yield the pieces of a streaming request, each of `stream_interval` tokens (or --stream-interval)."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[OutputPiece] = asyncio.Queue()
        cutter = OutputSplitter(request.params.stream_interval or self.core.options.stream_interval)

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
                    if (failure := _failure(seq)) is not None:
                        raise failure
                    [text] = await self.writer.make([seq], lambda texts: texts)
                    piece.text = text[sent:]
                sent += len(piece.text)
                yield seq, piece
                if piece.finish is not None:
                    return
        finally:
            if seq.finish is None:
                self._abandon([seq])


def _failure(seq: Sequence) -> RequestFailed | None:
    """Return the error that a sequence ended with; None if it runs, is complete or was aborted."""
    if seq.finish is None or "status_code" not in seq.finish:
        return None
    kind = StaleWeights if seq.finish["status_code"] == StaleWeights.status else RequestFailed
    return kind(seq.finish["message"])


def run_in_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but the end of the process does not wait for it."""
    result: ThreadFuture[T] = ThreadFuture()

    def run() -> None:
        result.set_running_or_notify_cancel()  # from here on the waiter may stop waiting, but cannot cancel
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(result)
