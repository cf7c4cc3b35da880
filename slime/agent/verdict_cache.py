"""Cache of verdicts on texts: compiles, tests or times each distinct text once.

Invariant: for one text and one context at most one judge runs at a time. A judge that ends without raising is never
run again, with a file not in a later run either. An exception is not a verdict: the current waiters get it, and the
next request runs the judge again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from slime.errors import UserError
from slime.storage.json_types import JsonObject

Verdict = JsonObject


class Verdicts:
    """Verdicts by the hash of a text.

    `context` names everything else that a verdict depends on: the tests, the compiler and its flags, the machine for
    timings. `file` has one JSON object per line; lines of other contexts stay there and are ignored, and so is a line
    that a crash cut off.
    """

    def __init__(self, file: Path | None = None, *, context: Mapping[str, str] | None = None) -> None:
        self._file, self._context = file, json.dumps(dict(context or {}), sort_keys=True)
        self._running: dict[str, asyncio.Task[Verdict]] = {}
        self._known: dict[str, Verdict] = {} if file is None else _read(file)
        self.asked = 0
        """Number of requests."""
        self.judged = 0
        """Number of judge runs."""

    async def of(self, text: str, judge: Callable[[str], Awaitable[Verdict]]) -> Verdict:
        """Return the verdict on a text: from the cache, from the judge that is running, or from a new judge run."""
        self.asked += 1
        key = self.key(text)
        if key in self._known:
            return self._known[key]
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._run_judge(key, text, judge))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # a cancelled waiter does not cancel the judge for the others

    def key(self, text: str) -> str:
        """Return the hash under which the verdict on a text is stored."""
        return hashlib.sha256(f"{self._context}\0{text}".encode()).hexdigest()

    async def _run_judge(self, key: str, text: str, judge: Callable[[str], Awaitable[Verdict]]) -> Verdict:
        self.judged += 1
        verdict = await judge(text)
        line = json.dumps({"key": key, "verdict": verdict, "text": text})
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        self._known[key] = verdict
        return verdict

    def _forget(self, key: str, task: asyncio.Task[Verdict]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the waiters have it, and without waiters it is dropped

    async def aclose(self) -> None:
        """Cancel the judges that are running."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _read(file: Path) -> dict[str, Verdict]:
    file.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Verdict] = {}
    if not file.exists():
        return known
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{file}: cannot read verdicts ({error.strerror}): remove the file") from error
    if text and not text.endswith("\n"):  # a crash cut the last line off: start a new line
        with file.open("a", encoding="utf-8") as out:
            out.write("\n")
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("key"), str) and isinstance(row.get("verdict"), dict):
            known[row["key"]] = row["verdict"]
    return known
