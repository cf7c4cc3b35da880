"""Verdict cache: each text is judged once, by concurrent calls, repeated calls and later runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime.agent.verdict_cache import Verdicts


class Judge:
    """Judge that returns the length of a text once `may` is set, and records its calls."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.may = asyncio.Event()
        self.may.set()
        self.fails = 0

    async def __call__(self, text: str) -> dict[str, Any]:
        self.texts.append(text)
        await self.may.wait()
        if self.fails:
            self.fails -= 1
            raise OSError("no sandbox")
        return {"length": len(text)}


def test_concurrent_requests_for_a_text_are_judged_once() -> None:
    async def main() -> None:
        verdicts, judge = Verdicts(), Judge()
        judge.may.clear()
        asked = [asyncio.create_task(verdicts.of(text, judge)) for text in ("aa", "b", "aa", "aa")]
        await asyncio.sleep(0)
        judge.may.set()
        assert [found["length"] for found in await asyncio.gather(*asked)] == [2, 1, 2, 2]
        assert await verdicts.of("aa", judge) == {"length": 2}
        assert judge.texts == ["aa", "b"]
        assert (verdicts.asked, verdicts.judged) == (5, 2)

    asyncio.run(main())


def test_cancelled_caller_does_not_cancel_a_shared_verdict() -> None:
    async def main() -> None:
        verdicts, judge = Verdicts(), Judge()
        judge.may.clear()
        first, second = (asyncio.create_task(verdicts.of("aa", judge)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        judge.may.set()
        assert await second == {"length": 2}
        assert judge.texts == ["aa"]

    asyncio.run(main())


def test_failed_judgement_is_retried() -> None:
    async def main() -> None:
        verdicts, judge = Verdicts(), Judge()
        judge.fails = 1
        with pytest.raises(OSError, match="no sandbox"):
            await verdicts.of("aa", judge)
        assert await verdicts.of("aa", judge) == {"length": 2}

    asyncio.run(main())


def test_verdicts_persist_across_runs_of_the_same_context(tmp_path: Path) -> None:
    file = tmp_path / "run" / "verdicts.jsonl"

    async def ask(judge: Judge, **context: str) -> None:
        assert await Verdicts(file, context=context).of("aa", judge) == {"length": 2}

    judges = [Judge() for _ in range(4)]
    asyncio.run(ask(judges[0], compiler="gcc 12"))
    asyncio.run(ask(judges[1], compiler="gcc 12"))
    asyncio.run(ask(judges[2], compiler="gcc 13"))
    asyncio.run(ask(judges[3], compiler="gcc 12"))
    assert [len(judge.texts) for judge in judges] == [1, 0, 1, 0]


def test_truncated_line_loses_only_its_verdict(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"

    async def ask(judge: Judge) -> None:
        verdicts = Verdicts(file)
        for text in ("aa", "b"):
            await verdicts.of(text, judge)

    first, second, third = Judge(), Judge(), Judge()
    asyncio.run(ask(first))
    whole = file.read_bytes()
    file.write_bytes(whole[:-20] + b"\xff")
    asyncio.run(ask(second))
    asyncio.run(ask(third))
    assert (first.texts, second.texts, third.texts) == (["aa", "b"], ["b"], [])


def test_close_cancels_pending_verdicts() -> None:
    async def main() -> None:
        verdicts, judge = Verdicts(), Judge()
        judge.may.clear()
        asked = asyncio.create_task(verdicts.of("aa", judge))
        await asyncio.sleep(0)
        await verdicts.aclose()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(main())
