"""A word about work that turns out to take long, before there is a display: reading a large file of prompts, say.

Invariant: quick work is not mentioned, and slow work is never silent for longer than a display of lines would be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.observe.figures import format_seconds
from slime.observe.progress import QUIET_S

FIRST_S = 3.0


@contextmanager
def told_if_slow(what: str, *, silent: bool = False, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Say `what` after a few seconds, and then again and again, until the body is done; `silent` says nothing."""
    done = threading.Event()
    began = time.monotonic()
    tell = say or (lambda text: print(text, flush=True))

    def listen() -> None:
        wait_s = FIRST_S
        while not done.wait(wait_s):
            tell(f"[{format_seconds(time.monotonic() - began)}] {what}")
            wait_s = QUIET_S

    if not silent:
        threading.Thread(target=listen, name="patience", daemon=True).start()
    try:
        yield
    finally:
        done.set()
