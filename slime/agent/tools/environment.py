"""The tools of a task, and what happens when a model calls them.

Invariant: `ToolBox.run` answers every call with exactly one result, in the order of the calls, whatever the tools do;
calls of one turn run at the same time. Nothing that a tool raises, returns or keeps waiting for gets further than its
result. A tool has its limits over all samples of the run; what it keeps for an attempt is gone with the attempt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from slime.agent.conversation import converse
from slime.agent.messages import Message, ToolCall, messages_of
from slime.agent.session.limits import LimitReached
from slime.agent.tools.functions import FunctionTool, sample_here
from slime.agent.tools.interpreter import PythonInterpreter
from slime.agent.tools.tool import Tool, ToolCounts, ToolFailure, ToolOutcome, ToolProvider, ToolResult, bounded
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.runtime import runtime_for

logger = logging.getLogger(__name__)


class ToolEnvironment:
    """What a task's model may call: functions, interpreters, MCP servers.

    Made once, at the top of a plugin file for instance; nothing is started before the first attempt. `max_calls` bounds
    the calls of one attempt: those beyond it are refused. An outcome in `fails_sample` is not shown to the model: it
    raises, so that the sample fails instead of being trained on what was not its fault. `aclose` ends what the tools
    started; in a run that happens with the run.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | ToolProvider],
        *,
        max_calls: int | None = None,
        fails_sample: Collection[ToolOutcome] = (),
    ) -> None:
        self._providers: list[ToolProvider] = [_as_provider(tool) for tool in tools]
        self._max_calls, self._fails_sample = max_calls, frozenset(fails_sample)
        self._at_once: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def open(self, sample: Any = None) -> AsyncIterator[ToolBox]:
        """The tools for one attempt; functions with a parameter `sample` get this one."""
        async with AsyncExitStack() as stack:
            tools: dict[str, Tool] = {}
            for provider in self._providers:
                for tool in await stack.enter_async_context(provider.open()):
                    if tool.name in tools:
                        raise UserError(f"two tools have the name {tool.name!r}: give one of them another")
                    tools[tool.name] = tool
            yield ToolBox(tools, self._at_once, self._max_calls, self._fails_sample, sample)

    def in_run(self, sandbox: str) -> None:
        """Interpreters that were given no kind of sandbox take that of the run, `--sandbox`."""
        for provider in self._providers:
            if isinstance(provider, PythonInterpreter):
                provider.follow(sandbox)

    async def aclose(self) -> None:
        """End what was started."""
        for provider in self._providers:
            await provider.aclose()


def _as_provider(tool: Callable[..., Any] | ToolProvider) -> ToolProvider:
    if hasattr(tool, "open") and hasattr(tool, "aclose"):
        return tool
    return FunctionTool(tool)


class ToolBox:
    """The tools of one attempt, with the counts of what came of the calls."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        at_once: dict[str, asyncio.Semaphore],
        max_calls: int | None,
        fails_sample: frozenset[ToolOutcome],
        sample: Any,
    ) -> None:
        self._tools, self._at_once, self._max_calls, self._sample = tools, at_once, max_calls, sample
        self._fails_sample = fails_sample
        self.counts = ToolCounts()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """For the chat template and for `tools=` of a client."""
        return [dict(tool.schema) for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """All calls of a turn, at the same time; their results in the order of the calls."""
        before = self.counts.outcomes.total()
        left = len(calls) if self._max_calls is None else max(0, self._max_calls - before)
        results = await asyncio.gather(*(self._one(call, is_allowed=i < left) for i, call in enumerate(calls)))
        for result in results:
            self.counts.add(result)
        for result in results:
            if result.outcome in self._fails_sample:
                raise ToolFailure(result.outcome, f"tool {result.call.name}: {result.outcome}: {result.text}")
        return results

    async def call(self, name: str, arguments: Mapping[str, Any] | str) -> ToolResult:
        """One call by name, for loops that read calls by themselves (`<search>...</search>`)."""
        text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments))
        return (await self.run([ToolCall(f"call_{self.counts.outcomes.total()}", name, text)]))[0]

    async def _one(self, call: ToolCall, *, is_allowed: bool) -> ToolResult:
        began = time.monotonic()
        tool = self._tools.get(call.name)
        limit = 8192 if tool is None else tool.limits.max_result_chars
        try:
            if tool is None:
                known = ", ".join(self._tools) or "none"
                raise ToolFailure(ToolOutcome.UNKNOWN_TOOL, f"there is no tool {call.name!r:.80}; there are: {known}")
            if not is_allowed:
                raise ToolFailure(ToolOutcome.REFUSED, f"no more than {self._max_calls} calls are allowed")
            text, cut = bounded(await self._called(tool, _arguments(call)), limit)
            return ToolResult(call, ToolOutcome.OK, text, time.monotonic() - began, cut)
        except ToolFailure as failure:
            text, cut = bounded(failure.text, limit)
            return ToolResult(call, failure.outcome, f"Error: {text}", time.monotonic() - began, cut)

    async def _called(self, tool: Tool, arguments: dict[str, Any]) -> str:
        at_once = self._at_once.setdefault(tool.name, asyncio.Semaphore(tool.limits.concurrency))
        token = sample_here.set(self._sample)
        try:
            async with at_once, asyncio.timeout(tool.limits.timeout_s) as deadline:
                return await tool.call(arguments)
        except TimeoutError as error:
            if not deadline.expired():  # its own, of a request that it made
                raise ToolFailure(ToolOutcome.ERROR, f"{type(error).__name__}: {error}") from error
            text = f"{tool.name} did not answer within {tool.limits.timeout_s:g} s"
            raise ToolFailure(ToolOutcome.TIMEOUT, text) from error
        except (ToolFailure, UserError):
            raise
        except (Exception, SystemExit) as error:  # whatever a tool raises is its call's outcome
            logger.info("tool %s raised", tool.name, exc_info=True)
            raise ToolFailure(ToolOutcome.ERROR, f"{type(error).__name__}: {error}") from error
        finally:
            sample_here.reset(token)


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        text = f"the arguments of {call.name} are no JSON: {error}"
        raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, text) from error
    if not isinstance(arguments, dict):
        raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, f"the arguments of {call.name} are no JSON object")
    return arguments


# The usual generate function of a model with tools: ask, run what it calls, tell it, until it calls nothing.


async def run_with_tools(
    args: Any,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    environment: ToolEnvironment,
    *,
    messages: Sequence[Message] | None = None,
    max_turns: int | None = None,
) -> list[Sample]:
    """A whole attempt, as samples; the body of a function for `--custom-generate-function-path`.

    It begins with `messages` (default: the sample's prompt) and ends when the model calls no tool, or with a limit
    (`max_turns`, default `--max-turns`; `--session-max-tokens`; the context), in which case its status is TRUNCATED.
    The samples' metadata tells rewards what happened: `answer`, what the model said in the end, which is "" after a
    limit; `round_number`, its turns; `tool_calls`, how its calls ended. What the tools started is ended with the run.
    """
    own_for_the_run(args, environment)
    begun_with = opening_messages(args, sample) if messages is None else messages
    async with (
        environment.open(sample) as box,
        converse(args, sample, sampling_params, tools=box.schemas, max_turns=max_turns) as talk,
    ):
        reply = await talk.ask(begun_with)
        turns, answer = 1, reply.content
        try:
            while reply.tool_calls:
                results = await box.run(reply.tool_calls)
                reply = await talk.ask([result.message for result in results])
                turns, answer = turns + 1, reply.content
        except LimitReached:  # noted in the session: the samples are TRUNCATED
            answer = ""
        samples = talk.finish(metadata={"answer": answer, "round_number": turns})
        note_tool_calls(samples, box)
        return samples


def opening_messages(args: Any, sample: Sample) -> list[Message]:
    """What a sample's conversation begins with; refuses a prompt that is rendered already, for it would be twice."""
    if isinstance(sample.prompt, str) and runtime_for(args).args.apply_chat_template:
        raise UserError(
            "--apply-chat-template makes a text of every prompt, but a conversation renders its messages itself: "
            "leave the flag out"
        )
    return messages_of(sample.prompt)


def note_tool_calls(samples: Sequence[Sample], box: ToolBox) -> None:
    """Have the run count the calls of an attempt, once: in its first sample; for loops other than `run_with_tools`."""
    for sample in samples[:1]:
        sample.metadata["tool_calls"] = box.counts.to_metadata()


def own_for_the_run(args: Any, environment: ToolEnvironment) -> None:
    """Have the run that `args` belong to end what the environment starts, and say what its interpreters run in; for
    loops other than `run_with_tools`.
    """
    runtime = runtime_for(args)
    environment.in_run(runtime.args.sandbox)
    runtime.owned(f"tools {id(environment)}", lambda: environment, ToolEnvironment.aclose)
