"""ReTool: the model writes code, an interpreter runs it, and the answer stands in a box."""

import json
import re

from tool_sandbox import TOOL_CONFIGS, tool_registry

from slime.rollout.rm_hub.math_dapo_utils import compute_score as math_dapo_compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TOOL_TEMPLATE = """\
<|im_start|>system
{%- if messages[0]['role'] == 'system' %}
{{ messages[0]['content'] }}
{%- else %}
You are a helpful assistant.
{%- endif %}
{%- if tools %}
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{%- endif %}<|im_end|>
{%- for message in messages %}
{%- if message['role'] != 'system' %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{%- endif %}
{%- endfor %}
<|im_start|>assistant
"""


def format_conversation_with_tools(tokenizer, prompt, tools=None, system_prompt=None):
    messages = [{"role": "system", "content": system_prompt or "Solve the problem with the tools you have."}]
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages.extend(prompt)
    text = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=TOOL_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    return text if text.endswith("\n") else text + "\n"


def postprocess_predictions(prediction):
    """(action, content): an answer, code to run, a tool call that cannot be read, or nothing."""
    answer = re.search(r"Answer:\s*\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", prediction, re.DOTALL)
    if answer:
        return "answer", answer.group(1).strip()
    tool_call = re.search(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", prediction, re.DOTALL)
    if tool_call:
        try:
            call = json.loads(tool_call.group(1))
        except json.JSONDecodeError:
            return "invalid", ""
        if call.get("name") == "code_interpreter" and call.get("arguments", {}).get("code", "").strip():
            return "code", call["arguments"]["code"]
        return "invalid", ""
    block = re.search(r"```python\s*(.*?)\s*```", prediction, re.DOTALL)
    if block:
        return "code", block.group(1).strip()
    return None, ""


async def execute_predictions(prediction):
    action, content = postprocess_predictions(prediction)
    if action == "code":
        result = await tool_registry.execute_tool("code_interpreter", {"code": content})
        return f"\n\n<interpreter>\n{result}\n</interpreter>\n\n", False, True
    if action == "answer":
        return "", True, False
    return (
        "\nMy previous action is invalid. If I want to execute code, I should put it between <tool_call> and "
        "</tool_call>. If I want to give the final answer, I should use 'Answer: \\boxed{answer}'.\n",
        False,
        False,
    )


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function at the moment."

    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    tool_specs = tool_registry.get_tool_specs()
    prompt = format_conversation_with_tools(state.tokenizer, sample.prompt, tools=tool_specs)
    prompt_token_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response = ""
    response_token_ids = []
    loss_masks = []
    tool_call_count = 0

    if args.rollout_max_context_len is not None:
        max_context_length = args.rollout_max_context_len
    else:
        max_context_length = args.context_parallel_size * args.max_tokens_per_gpu

    for _turn in range(TOOL_CONFIGS["max_turns"]):
        if len(prompt_token_ids) + len(response_token_ids) >= max_context_length:
            sample.status = Sample.Status.TRUNCATED
            break

        current_token_ids = prompt_token_ids + response_token_ids
        payload = {"input_ids": current_token_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)

        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample

        cur_token_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        cur_log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        cur_response = state.tokenizer.decode(cur_token_ids)
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = []
        sample.rollout_log_probs += cur_log_probs
        response += cur_response
        response_token_ids += cur_token_ids
        loss_masks += [1] * len(cur_token_ids)

        if output["meta_info"]["finish_reason"]["type"] == "length":
            sample.status = Sample.Status.TRUNCATED
            break

        next_obs, done, called = await execute_predictions(cur_response)
        if called:
            tool_call_count += 1
        if done:
            sample.status = Sample.Status.COMPLETED
            break

        assert next_obs != "", "Next observation should not be empty."
        obs_token_ids = state.tokenizer(next_obs, add_special_tokens=False)["input_ids"]
        response += next_obs
        response_token_ids += obs_token_ids
        loss_masks += [0] * len(obs_token_ids)
        sample.rollout_log_probs += [0.0] * len(obs_token_ids)
        assert len(response_token_ids) == len(sample.rollout_log_probs)

        if tool_call_count >= TOOL_CONFIGS["max_tool_calls"]:
            break

    sample.tokens = prompt_token_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.payload_text = prompt + response
    sample.payload_has_system = "<|im_start|>system" in prompt
    sample.payload_has_tools = "# Tools" in prompt
    sample.tool_call_count = tool_call_count
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")

    solution_str = sample.prompt + sample.response
    ground_truth = sample.label if sample.label is not None else ""
    num_turns = getattr(sample, "tool_call_count", 0)

    result = math_dapo_compute_score(solution_str, ground_truth, strict_box_verify=True)
    if result["score"] < 0:
        # a wrong answer is a little less wrong if the tool was asked
        tool_call_reward = (num_turns - 2) / 2 * 0.1
        result["score"] = min(-0.6, result["score"] + tool_call_reward)
    if result["pred"] is None:
        result["pred"] = ""
    return result
