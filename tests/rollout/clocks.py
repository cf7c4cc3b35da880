"""An event-loop clock that the test advances, so no real time has to pass and slow machines do not matter."""

from __future__ import annotations

import asyncio


class ClockAhead:
    """Replaces the clock of the running loop; `seconds` are added to the real time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self.seconds = 0.0
        loop.time = lambda: real() + self.seconds  # type: ignore[method-assign]

    async def put_forward(self, seconds: float) -> None:
        """Advance the clock; callbacks that became due have run when this returns."""
        self.seconds += seconds
        for _ in range(10):
            await asyncio.sleep(0)
