"""Control routes in random order: tokens match their weight version, no hang, every request is answered."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tests.engine.orders import Orders, Refused

SEQUENCES = int(os.environ.get("SLIME_FUZZ_SEQUENCES", "40"))
SEED = int(os.environ.get("SLIME_FUZZ_SEED", "1"))


def test_random_control_calls_give_tokens_of_the_right_weights(tmp_path: Path) -> None:
    async def run() -> None:
        began = time.perf_counter()
        async with Orders(SEED, tmp_path) as orders:
            for number in range(SEQUENCES):
                try:
                    await orders.sequence()
                except Refused as reason:
                    raise AssertionError("\n".join([f"sequence {number}: {reason}", *orders.log])) from reason
                assert not orders.deaths
            counts = dict(orders.counts.most_common())
        print(f"{SEQUENCES} sequences in {time.perf_counter() - began:.0f} s: {counts}")

    asyncio.run(run())
