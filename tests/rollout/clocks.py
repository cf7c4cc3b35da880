"""The clock of an event loop, put forward by the test: no time has to pass, and a slow machine takes none."""

from __future__ import annotations

import asyncio


class ClockAhead:
    """The running loop's clock from now on; `seconds` are added to it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self.seconds = 0.0
        loop.time = lambda: real() + self.seconds  # type: ignore[method-assign]

    async def put_forward(self, seconds: float) -> None:
        """By so much; what was due in that time has been called when this returns."""
        self.seconds += seconds
        for _ in range(10):
            await asyncio.sleep(0)
