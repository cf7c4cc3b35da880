"""Limits on the resources that the requests of one session use, and a thread pool for work on large requests.

Invariants: nothing of a body is read before its key is known; where only the body names its session, all such requests
together have the limits of one session. Work whose cost grows with the body runs on the event loop only below a size
that takes it a few milliseconds. One session has one such job in the threads at a time, even after its client has
disconnected, so that the jobs of other sessions do not queue behind it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from slime.agent.server.dialects import Kind, Problem
from slime.agent.session.template import CHARACTERS_PER_TOKEN

T = TypeVar("T")

WORKERS = 4
INLINE_BODY_BYTES = 32 << 10
INLINE_CHARACTERS = 4096
"""The longest text that is tokenized on the event loop."""
_BODY_BYTES_PER_TOKEN = 24
_STRUCTURE = (b",", b"{", b"[")


@dataclass(frozen=True)
class IntakeLimits:
    """The limits of one session's requests."""

    requests: int = 128
    """Requests in flight, from the check of the key to the end of the answer."""
    body_bytes: int = 4 << 20
    values: int = 1 << 17
    """JSON values in a body, counted by its commas and brackets: parsing blocks the process until it is done."""
    held_bytes: int = 64 << 20
    """Total size of all bodies in flight."""
    body_s: float = 60.0
    """Seconds for a body to arrive."""

    @classmethod
    def of_context(cls, context: int | None) -> IntakeLimits:
        """The limits for prompts of at most `context` tokens."""
        if context is None:
            return cls(body_bytes=64 << 20, values=16 << 20, held_bytes=256 << 20)
        body = min(max(cls.body_bytes, _BODY_BYTES_PER_TOKEN * context), 64 << 20)
        return cls(body_bytes=body, values=max(cls.values, 4 * context), held_bytes=max(cls.held_bytes, 4 * body))


class Intake:
    """Counts the requests in flight of one session, or of what `whose` names, against their limits."""

    def __init__(
        self,
        context: int | None,
        workers: ThreadPoolExecutor,
        *,
        limits: IntakeLimits | None = None,
        whose: str = "this session",
    ) -> None:
        """`context` is the maximum number of prompt tokens, None without a limit; it sets `limits` by default."""
        self.context = context
        self.inline_bytes = INLINE_BODY_BYTES
        """The largest body that is parsed on the event loop; its prompt is certainly not too long for the context."""
        if context is not None:
            self.inline_bytes = min(INLINE_BODY_BYTES, CHARACTERS_PER_TOKEN * context)
        self.limits = limits or IntakeLimits.of_context(context)
        self.whose = whose
        self._workers = workers
        self._requests = self._bytes = 0
        self._working = asyncio.Semaphore(1)

    @contextmanager
    def request(self) -> Iterator[RequestReservation]:
        """Reserve the resources of one request until it is answered; raises `Problem` if the session has too many."""
        room = RequestReservation(self)
        try:
            yield room
        finally:
            room.leave()

    def take(self, requests: int, size: int) -> None:
        """Add to the requests and bytes in use; raises `Problem` beyond a limit."""
        if self._requests + requests > self.limits.requests:
            raise Problem(Kind.FULL, f"{self._requests} requests of {self.whose} are in flight: retry later")
        if self._bytes + size > self.limits.held_bytes:
            raise Problem(Kind.FULL, f"requests of {self.whose} hold {self._bytes} bytes: retry later")
        self._requests += requests
        self._bytes += size

    def give_back(self, requests: int, size: int) -> None:
        """Subtract from the requests and bytes in use."""
        self._requests -= requests
        self._bytes -= size

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, after the session's other jobs, and return its result."""
        await self._working.acquire()
        loop = asyncio.get_running_loop()
        job = self._workers.submit(work)

        def done(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._working.release)

        job.add_done_callback(done)
        return await asyncio.wrap_future(job)


class RequestReservation:
    """The resources that one request has reserved."""

    def __init__(self, intake: Intake) -> None:
        intake.take(1, 0)
        self._intake, self.bytes = intake, 0

    def move_to(self, intake: Intake) -> None:
        """Count the request against another session's limits from now on; raises `Problem` beyond one of them."""
        if intake is not self._intake:
            intake.take(1, self.bytes)
            self._intake.give_back(1, self.bytes)
            self._intake = intake

    def leave(self) -> None:
        """Release the reserved resources; the request is answered."""
        self._intake.give_back(1, self.bytes)

    async def body(self, http: web.Request, *, is_decompressed: bool = False) -> bytes:
        """Read the body, decompressed if needed; raises `Problem` if it is too large, slow or invalid."""
        intake, limits = self._intake, self._intake.limits
        if (http.content_length or 0) > limits.body_bytes:
            raise _body_too_large(limits)
        pieces = []
        try:
            async with asyncio.timeout(limits.body_s):
                while piece := await http.content.readany():
                    self._take(len(piece))
                    if self.bytes > self._intake.limits.body_bytes:
                        raise _body_too_large(self._intake.limits)
                    pieces.append(piece)
        except TimeoutError as error:
            raise Problem(Kind.BAD_BODY, f"the body did not arrive within {limits.body_s:g} s") from error
        except web.RequestPayloadError as error:
            raise Problem(Kind.BAD_BODY, f"the body cannot be read: {error}") from error
        body = b"".join(pieces)
        coding = http.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity") and not is_decompressed:
            body = await intake.run(lambda: _decompress_body(body, coding, limits))
            self._take(len(body))
        if len(body) > INLINE_BODY_BYTES and sum(map(body.count, _STRUCTURE)) > limits.values:
            raise Problem(Kind.TOO_LONG, f"the body has more than {limits.values} JSON values")
        return body

    def _take(self, size: int) -> None:
        self._intake.take(0, size)
        self.bytes += size


def _body_too_large(limits: IntakeLimits) -> Problem:
    return Problem(Kind.TOO_LONG, f"the body has more than {limits.body_bytes} bytes")


def _decompress_body(body: bytes, coding: str, limits: IntakeLimits) -> bytes:
    if coding not in ("gzip", "deflate"):
        raise Problem(Kind.BAD_BODY, f"Content-Encoding {coding!r:.40} is not read here: send gzip, deflate or none")
    try:
        reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
        whole = reader.decompress(body, limits.body_bytes + 1)
    except zlib.error as error:
        raise Problem(Kind.BAD_BODY, f"the body cannot be decompressed: {error}") from error
    if len(whole) > limits.body_bytes:
        raise _body_too_large(limits)
    if not reader.eof:
        raise Problem(Kind.BAD_BODY, "the body cannot be decompressed: it ends early")
    return whole
