"""The tools of a task: runs the calls of a model, and the usual generate function of a model with tools.

Invariants: `ToolBox.run` answers every call with exactly one result, in the order of the calls, whether its tool
returns, raises or hangs; calls of one turn run concurrently. An error or a hang of a tool affects only its own result.
The limits of a tool hold over all samples of the run; the state of a tool for an attempt ends with the attempt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from slime.agent.conversation import converse
from slime.agent.messages import Message, ToolCall, messages_of
from slime.agent.session.limits import LimitReached
from slime.agent.tools.functions import FunctionTool, sample_here
from slime.agent.tools.interpreter import PythonInterpreter
from slime.agent.tools.tool import (
    Tool,
    ToolCounts,
    ToolFailure,
    ToolOutcome,
    ToolProvider,
    ToolResult,
    shorten_text,
)
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.runtime import runtime_for
from slime.storage.json_types import JsonMapping, JsonObject

logger = logging.getLogger(__name__)


class ToolEnvironment:
    """The tools of a task: functions, interpreters, MCP servers.

    Create it once, for instance at the top of a plugin file; nothing is started before the first attempt. `max_calls`
    limits the calls of one attempt; further calls are refused. An outcome in `fails_sample` is not shown to the model:
    it raises, so that the sample fails instead of being trained on a failure that the model did not cause. `aclose`
    stops everything that the tools started; a run calls it at its end.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., object] | ToolProvider],
        *,
        max_calls: int | None = None,
        fails_sample: Collection[ToolOutcome] = (),
    ) -> None:
        self._providers: list[ToolProvider] = []
        for tool in tools:
            if hasattr(tool, "open") and hasattr(tool, "aclose"):
                self._providers.append(tool)
            else:
                self._providers.append(FunctionTool(tool))
        self._max_calls, self._fails_sample = max_calls, frozenset(fails_sample)
        self._at_once: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def open(self, sample: object = None) -> AsyncIterator[ToolBox]:
        """Open the tools for one attempt; functions with a parameter `sample` get this `sample`."""
        async with AsyncExitStack() as stack:
            tools: dict[str, Tool] = {}
            for provider in self._providers:
                for tool in await stack.enter_async_context(provider.open()):
                    if tool.name in tools:
                        raise UserError(f"two tools have the name {tool.name!r}: rename one of them")
                    tools[tool.name] = tool
            yield ToolBox(tools, self._at_once, self._max_calls, self._fails_sample, sample)

    def in_run(self, sandbox: str) -> None:
        """Set the sandbox kind of the run (`--sandbox`) for interpreters without their own."""
        for provider in self._providers:
            if isinstance(provider, PythonInterpreter):
                provider.follow(sandbox)

    async def aclose(self) -> None:
        """Stop everything that the tools started."""
        for provider in self._providers:
            await provider.aclose()


class ToolBox:
    """The tools of one attempt, with the counts of the outcomes of its calls."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        at_once: dict[str, asyncio.Semaphore],
        max_calls: int | None,
        fails_sample: frozenset[ToolOutcome],
        sample: object,
    ) -> None:
        self._tools, self._at_once, self._max_calls, self._sample = tools, at_once, max_calls, sample
        self._fails_sample = fails_sample
        self.counts = ToolCounts()

    @property
    def schemas(self) -> list[JsonObject]:
        """The schemas of the tools, for the chat template and for `tools=` of a client."""
        return [dict(tool.schema) for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run all calls of a turn concurrently and return their results in the order of the calls."""
        before = self.counts.outcomes.total()
        left = len(calls) if self._max_calls is None else max(0, self._max_calls - before)
        results = await asyncio.gather(*(self._one(call, is_allowed=i < left) for i, call in enumerate(calls)))
        for result in results:
            self.counts.add(result)
        for result in results:
            if result.outcome in self._fails_sample:
                raise ToolFailure(result.outcome, f"tool {result.call.name}: {result.outcome}: {result.text}")
        return results

    async def call(self, name: str, arguments: JsonMapping | str) -> ToolResult:
        """Run one call by name, for loops that parse calls themselves (`<search>...</search>`)."""
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
            try:
                arguments = json.loads(call.arguments or "{}")
            except (ValueError, RecursionError) as error:
                reason = f"the arguments of {call.name} are not valid JSON: {error}"
                raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, reason) from error
            if not isinstance(arguments, dict):
                reason = f"the arguments of {call.name} are not a JSON object"
                raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, reason)
            text, cut = shorten_text(await self._call_tool(tool, arguments), limit)
            return ToolResult(call, ToolOutcome.OK, text, time.monotonic() - began, cut)
        except ToolFailure as failure:
            text, cut = shorten_text(failure.text, limit)
            return ToolResult(call, failure.outcome, f"Error: {text}", time.monotonic() - began, cut)

    async def _call_tool(self, tool: Tool, arguments: JsonObject) -> str:
        """Run a tool under its concurrency limit and timeout; any failure becomes a `ToolFailure`."""
        at_once = self._at_once.setdefault(tool.name, asyncio.Semaphore(tool.limits.concurrency))
        token = sample_here.set(self._sample)
        try:
            async with at_once, asyncio.timeout(tool.limits.timeout_s) as deadline:
                return await tool.call(arguments)
        except TimeoutError as error:
            if not deadline.expired():  # a timeout of the tool itself
                raise ToolFailure(ToolOutcome.ERROR, f"{type(error).__name__}: {error}") from error
            text = f"{tool.name} did not answer within {tool.limits.timeout_s:g} s"
            raise ToolFailure(ToolOutcome.TIMEOUT, text) from error
        except (ToolFailure, UserError):
            raise
        except (Exception, SystemExit) as error:  # any exception of a tool is the outcome of its call
            logger.info("tool %s raised", tool.name, exc_info=True)
            raise ToolFailure(ToolOutcome.ERROR, f"{type(error).__name__}: {error}") from error
        finally:
            sample_here.reset(token)


async def run_with_tools(
    args: argparse.Namespace,
    sample: Sample,
    sampling_params: JsonMapping,
    environment: ToolEnvironment,
    *,
    messages: Sequence[Message] | None = None,
    max_turns: int | None = None,
) -> list[Sample]:
    """Run a whole attempt and return its samples; the body of a function for `--custom-generate-function-path`.

    The loop samples a reply, runs its tool calls and appends their results. It begins with `messages` (default: the
    sample's prompt) and ends when a reply calls no tool, or at a limit (`max_turns`, default `--max-turns`;
    `--session-max-tokens`; the context), in which case the status is TRUNCATED. The samples' metadata is for reward
    functions: `answer` is the text of the last reply, "" after a limit; `round_number` is the number of turns;
    `tool_calls` are the outcomes of the calls. Everything that the tools started is stopped at the end of the run.
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
        except LimitReached:  # the session has recorded the limit: the samples are TRUNCATED
            answer = ""
        samples = talk.finish(metadata={"answer": answer, "round_number": turns})
        note_tool_calls(samples, box)
        return samples


def opening_messages(args: argparse.Namespace, sample: Sample) -> list[Message]:
    """Return the first messages of a sample's conversation; a prompt that is rendered already is refused."""
    if isinstance(sample.prompt, str) and runtime_for(args).args.apply_chat_template:
        raise UserError(
            "--apply-chat-template renders every prompt to text, but a conversation renders its messages itself: "
            "remove the flag"
        )
    return messages_of(sample.prompt)


def note_tool_calls(samples: Sequence[Sample], box: ToolBox) -> None:
    """Store the counts of an attempt's calls in its first sample, for loops other than `run_with_tools`."""
    for sample in samples[:1]:
        sample.metadata["tool_calls"] = box.counts.to_metadata()


def own_for_the_run(args: argparse.Namespace, environment: ToolEnvironment) -> None:
    """Make the run of `args` close the environment at its end and choose the sandbox of its interpreters.

    For loops other than `run_with_tools`.
    """
    runtime = runtime_for(args)
    environment.in_run(runtime.args.sandbox)
    runtime.owned(f"tools {id(environment)}", lambda: environment, ToolEnvironment.aclose)
