"""An agent of a framework that knows messages and no tokens: they are made of its messages afterwards."""

import json

from agent_framework import Agent, EventLoopException, MaxTokensReachedException, OpenAIModel, tool

from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample

SYSTEM_PROMPT = "You are a careful mathematician. Put the answer into \\boxed{}."


@tool
def calculator(expression: str):
    """Compute an arithmetic expression."""
    if not set(expression) <= set("0123456789+-*/(). "):
        raise ValueError("only numbers and operators")
    return eval(expression)


def create_agent(args, sampling_params):
    model = OpenAIModel(
        client_args={
            "api_key": "EMPTY",
            "base_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1",
        },
        model_id=args.hf_checkpoint.split("/")[-1],
        params={
            "max_tokens": sampling_params["max_new_tokens"],
            "temperature": sampling_params["temperature"],
            "top_p": sampling_params["top_p"],
        },
    )
    return Agent(model=model, tools=[calculator], system_prompt=SYSTEM_PROMPT)


def for_template(message):
    """Templates read the arguments of a call as an object."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {"type": "function", "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def tokenize_trajectory(tokenizer, messages, tools):
    """Ids of the prompt, ids of everything after it, and 1 for each of those that the model wrote."""

    def render(count, add_generation_prompt):
        text = tokenizer.apply_chat_template(
            [for_template(message) for message in messages[:count]],
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return text

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    so_far = render(2, add_generation_prompt=True)
    prompt_ids, response_ids, loss_mask, response = encode(so_far), [], [], ""
    for count in range(3, len(messages) + 1):
        is_assistant = messages[count - 1]["role"] == "assistant"
        next_is_assistant = count < len(messages) and messages[count]["role"] == "assistant"
        text = render(count, add_generation_prompt=next_is_assistant)
        assert text.startswith(so_far)
        new_ids = encode(text[len(so_far) :])
        response += text[len(so_far) :]
        response_ids += new_ids
        loss_mask += [1 if is_assistant else 0] * len(new_ids)
        so_far = text
    return prompt_ids, response_ids, loss_mask, response


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function at the moment."

    state = GenerateState(args)
    agent = create_agent(args, sampling_params)
    prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]

    sample.status = Sample.Status.COMPLETED
    try:
        await agent.invoke_async(prompt)
    except MaxTokensReachedException as error:
        agent.messages.append({"role": "assistant", "content": str(error)})
        sample.status = Sample.Status.TRUNCATED
    except EventLoopException:
        sample.status = Sample.Status.TRUNCATED

    prompt_ids, response_ids, loss_mask, response = tokenize_trajectory(
        state.tokenizer, agent.messages, agent.tool_specs
    )
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.tool_call_count = sum(len(message.get("tool_calls") or []) for message in agent.messages)
    sample.metadata["messages"] = agent.messages
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    if sample.metadata["messages"][-1]["role"] != "assistant":
        return 0.0
    right = grade_answer_verl(sample.metadata["messages"][-1]["content"], sample.label)
    return 1.0 if right else min(0.2, 0.1 * sample.tool_call_count)
