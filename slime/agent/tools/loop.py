"""The usual generate function of a model with tools: ask, run what it calls, tell it, until it calls nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.messages import Message, messages_of
from slime.agent.session.limits import LimitReached
from slime.agent.talk import converse
from slime.agent.tools.environment import ToolBox, ToolEnvironment
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.runtime import runtime_for


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
