"""What was found out about each distinct text, found out once.

A rollout asks about the same program again and again; compiling, testing or timing it a second time tells nothing new.
Invariant: for one text and one context a judge runs once at a time and, if it ended without raising, never again; with
a file not in a later run either. What raises is nobody's verdict: those who waited for it get the error, and whoever
asks next has it tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from slime.errors import UserError

Verdict = dict[str, Any]


class Verdicts:
    """Verdicts by the hash of a text.

    `context` names everything else that they depend on: the tests, the compiler and its flags, the machine for
    timings. In `file`, one JSON object a line, those of other contexts stay and are not looked at; a line that was cut
    off by a crash is left out.
    """

    def __init__(self, file: Path | None = None, *, context: Mapping[str, str] | None = None) -> None:
        self._file, self._context = file, json.dumps(dict(context or {}), sort_keys=True)
        self._running: dict[str, asyncio.Task[Verdict]] = {}
        self._known: dict[str, Verdict] = {} if file is None else _read(file)
        self.asked = 0
        """How often anybody wanted to know."""
        self.judged = 0
        """How often somebody had to find out."""

    async def of(self, text: str, judge: Callable[[str], Awaitable[Verdict]]) -> Verdict:
        """The verdict on a text: known, being found out already, or found out now."""
        self.asked += 1
        key = self.key(text)
        if key in self._known:
            return self._known[key]
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._find_out(key, text, judge))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # who gives up waiting takes nobody else's verdict along

    def key(self, text: str) -> str:
        """The hash under which the verdict on a text is kept."""
        return hashlib.sha256(f"{self._context}\0{text}".encode()).hexdigest()

    async def _find_out(self, key: str, text: str, judge: Callable[[str], Awaitable[Verdict]]) -> Verdict:
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
            task.exception()  # those who waited have it; with nobody left it is nobody's

    async def aclose(self) -> None:
        """Give up what is being found out."""
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
        raise UserError(f"{file} holds no verdicts that can be read ({error.strerror}): remove it") from error
    if text and not text.endswith("\n"):  # a crash while it was written; the next line begins a new one
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
