"""An agent that knows a base URL and a key and nothing of tokens: the official OpenAI SDK, a loop, and tools."""

from __future__ import annotations

from typing import Any

from slime.agent.messages import ToolCall
from slime.agent.remote_session import open_session
from slime.agent.tools import ToolBox, ToolEnvironment, note_tool_calls, own_for_the_run
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.runtime import runtime_for


async def run_as_client(
    args: Any, sample: Sample, sampling_params: dict[str, Any], environment: ToolEnvironment
) -> list[Sample]:
    """What `slime.agent.tools.run_with_tools` does, through the endpoint that any other agent would use."""
    from openai import APIStatusError

    own_for_the_run(args, environment)
    async with environment.open(sample) as box, open_session(args, sample, sampling_params) as session:
        client = _sdk(args).with_options(base_url=session.openai_url, api_key=session.key)
        try:
            answer = await talk(client, session.model, list(sample.prompt), box)
        except APIStatusError:  # the session has no more turns: what there is becomes a truncated sample
            answer = ""
        samples = await session.finish(metadata={"answer": answer})
        note_tool_calls(samples, box)
        return samples


async def talk(client: Any, model: str, messages: list[Any], box: ToolBox) -> str:
    """What the model says when it calls nothing any more."""
    while True:
        asked = await client.chat.completions.create(model=model, messages=messages, tools=box.schemas)
        message = asked.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
        for result in await box.run(calls):
            messages.append({"role": "tool", "tool_call_id": result.call.id, "content": result.text})


def _sdk(args: Any) -> Any:
    """One for the run: to make one takes 50 ms, to give a copy of it another address and key takes none."""
    return runtime_for(args).owned("the examples' OpenAI client", _made, lambda client: client.close())


def _made() -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise UserError("this example talks through OpenAI's SDK: pip install openai") from error
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)
