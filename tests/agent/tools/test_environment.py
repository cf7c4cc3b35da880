"""Tool environment: every call gets exactly one result, in order, even if tools fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from slime.agent.messages import Message, ToolCall
from slime.agent.tools import FunctionTool, ToolEnvironment, ToolError, ToolOutcome, ToolRefusal
from slime.agent.tools.tool import shorten_text
from slime.data.sample import Sample
from slime.errors import UserError


def calls(*named: tuple[str, str]) -> list[ToolCall]:
    return [ToolCall(f"c{i}", name, arguments) for i, (name, arguments) in enumerate(named)]


def results(tools: list[Any], *named: tuple[str, str], **options: Any) -> list[tuple[str, str]]:
    async def main() -> list[tuple[str, str]]:
        async with ToolEnvironment(tools, **options).open() as box:
            return [(result.outcome.value, result.text) for result in await box.run(calls(*named))]

    return asyncio.run(main())


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def shout(text: str) -> dict[str, Any]:
    return {"loud": text.upper(), "é": [1, None]}


def test_plain_and_async_functions_are_called() -> None:
    assert results([add, shout], ("shout", '{"text": "é"}'), ("add", '{"a": 2, "b": 3}')) == [
        ("ok", '{"loud": "É", "é": [1, null]}'),
        ("ok", "5"),
    ]


def test_plain_functions_do_not_run_on_the_event_loop() -> None:
    where: list[threading.Thread] = []

    def note() -> None:
        where.append(threading.current_thread())

    assert results([note], ("note", "")) == [("ok", "")]
    assert where[0] is not threading.current_thread()


def boom(what: str) -> str:
    match what:
        case "told":
            raise ToolError("there is no such city")
        case "refused":
            raise ToolRefusal("not that")
        case "exit":
            raise SystemExit(3)
        case "own":
            raise TimeoutError("the database is slow")
    raise KeyError(what)


@pytest.mark.parametrize(
    ("name", "arguments", "outcome", "text"),
    [
        ("boom", '{"what": "told"}', "error", "Error: there is no such city"),
        ("boom", '{"what": "refused"}', "refused", "Error: not that"),
        ("boom", '{"what": "x"}', "error", "Error: KeyError: 'x'"),
        ("boom", '{"what": "exit"}', "error", "Error: SystemExit: 3"),
        ("boom", '{"what": "own"}', "error", "Error: TimeoutError: the database is slow"),
        ("boom", "{}", "bad_arguments", "Error: arguments lack 'what'"),
        ("boom", '["x"]', "bad_arguments", "Error: the arguments of boom are not a JSON object"),
        ("add", '{"a": 1', "bad_arguments", "Error: the arguments of add are not valid JSON: Expecting ',' delimiter"),
        (
            "add",
            "[" * 100_000,
            "bad_arguments",
            "Error: the arguments of add are not valid JSON: maximum recursion depth",
        ),
        ("fly", "{}", "unknown_tool", "Error: there is no tool 'fly'; there are: add, boom"),
    ],
)
def test_every_failure_is_an_outcome_with_a_text(name: str, arguments: str, outcome: str, text: str) -> None:
    [(got, said)] = results([add, boom], (name, arguments))
    assert got == outcome
    assert said.startswith(text)


def test_a_failure_ends_only_its_call() -> None:
    named = ("boom", '{"what": "x"}'), ("add", '{"a": 1, "b": 1}'), ("fly", ""), ("add", '{"a": 2, "b": 2}')
    assert [outcome for outcome, _ in results([add, boom], *named)] == ["error", "ok", "unknown_tool", "ok"]


def test_tool_timeout_is_an_outcome() -> None:
    async def sleep() -> None:
        await asyncio.Event().wait()

    tool = FunctionTool(sleep, timeout_s=0.05)
    assert results([tool], ("sleep", "")) == [("timeout", "Error: sleep did not answer within 0.05 s")]


def test_calls_of_a_turn_run_concurrently_up_to_the_limit() -> None:
    running, most = 0, 0

    def counted(limit: int) -> Callable[[], Any]:
        barrier = asyncio.Barrier(limit)

        async def work() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await barrier.wait()  # passes only if `limit` calls run together
            running -= 1

        return work

    for limit in (3, 2):
        most = 0
        tool = FunctionTool(counted(limit), name="work", concurrency=limit, timeout_s=120)
        assert results([tool], *[("work", "")] * 6) == [("ok", "")] * 6
        assert most == limit


def test_long_results_keep_head_and_tail() -> None:
    assert shorten_text("abcdef", 6) == ("abcdef", 0)
    assert shorten_text("abcdefghij", 5) == ("abc\n... [5 characters left out] ...\nij", 5)
    assert shorten_text("abcdefghij", 1) == ("a\n... [9 characters left out] ...\n", 9)

    def long() -> str:
        return "x" * 100 + "y" * 100

    [(outcome, text)] = results([FunctionTool(long, max_result_chars=10)], ("long", ""))
    assert (outcome, text) == ("ok", "xxxxx\n... [190 characters left out] ...\nyyyyy")


def test_calls_beyond_the_budget_of_an_attempt_are_refused() -> None:
    named = [("add", '{"a": 1, "b": 1}')] * 3
    assert results([add], *named, max_calls=2) == [
        ("ok", "2"),
        ("ok", "2"),
        ("refused", "Error: no more than 2 calls are allowed"),
    ]


def test_functions_may_receive_the_sample() -> None:
    def label(sample: Sample) -> str:
        return str(sample.label)

    async def main() -> None:
        environment = ToolEnvironment([label])

        async def asked(text: str) -> str:
            async with environment.open(Sample(label=text)) as box:
                assert box.schemas[0]["function"]["parameters"]["properties"] == {}
                return (await box.call("label", {})).text

        assert await asyncio.gather(asked("a"), asked("b")) == ["a", "b"]

    asyncio.run(main())


def test_calls_are_counted_by_outcome() -> None:
    async def main() -> None:
        async with ToolEnvironment([add, boom]).open() as box:
            answered = await box.run(calls(("add", '{"a": 1, "b": 2}'), ("boom", "{}"), ("fly", "")))
            assert answered[0].message == Message("tool", "3", tool_call_id="c0", name="add")
            await box.call("add", {"a": 1, "b": 2})
            counts = box.counts.to_metadata()
            assert counts.pop("seconds") >= 0
            assert counts == {"calls": 4, "ok": 2, "bad_arguments": 1, "unknown_tool": 1}
            assert set(counts) - {"calls"} <= {outcome.value for outcome in ToolOutcome}

    asyncio.run(main())


def test_rejects_two_tools_with_the_same_name() -> None:
    with pytest.raises(UserError, match="two tools have the name 'add'"):
        results([add, FunctionTool(boom, name="add")])
