import dataclasses
import enum
import json
import re

from tau_env import RESPOND_ACTION_NAME, Action

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post


class Status(enum.Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclasses.dataclass
class InteractionResult:
    prompt: str
    reward: float
    messages: list
    info: dict
    response: str = ""
    response_length: int = 0
    loss_mask: list | None = None
    tokens: list | None = None
    status: Status = Status.COMPLETED


def parse_tools(response):
    """(success, text, calls) of what the model wrote."""
    calls = []
    for text in re.findall(r"<tool_call>(.*?)</tool_call>", response, re.DOTALL):
        try:
            calls.append(json.loads(text))
        except json.JSONDecodeError:
            return False, response, []
    return True, re.sub(r"<tool_call>.*?</tool_call>", "", response, flags=re.DOTALL), calls


def call_to_action(calls, text):
    if calls:
        return Action(calls[0]["name"], calls[0]["arguments"])
    return Action(RESPOND_ACTION_NAME, {"content": text})


class TrainableToolCallingAgent:
    def __init__(self, tools_info, wiki, rollout_args, sampling_params):
        self.tools_info = tools_info
        self.wiki = wiki
        self.rollout_args = rollout_args
        self.sampling_params = sampling_params

    def _render(self, tokenizer, messages, add_generation_prompt):
        return tokenizer.apply_chat_template(
            messages, tools=self.tools_info, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _get_token_delta(self, tokenizer, messages):
        """Ids that the last message adds to the conversation; what the model wrote is trained on."""
        is_assistant = messages[-1]["role"] == "assistant"
        curr = self._render(tokenizer, messages, add_generation_prompt=not is_assistant)
        prev = self._render(tokenizer, messages[:-1], add_generation_prompt=is_assistant)
        new_ids = tokenizer.encode(curr[len(prev) :], add_special_tokens=False)
        return new_ids, [1 if is_assistant else 0] * len(new_ids)

    async def asolve(self, env, max_num_steps=4):
        args = self.rollout_args
        state = GenerateState(args)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

        env_response = await env.reset()
        messages = [
            {"role": "system", "content": self.wiki},
            {"role": "user", "content": env_response.observation},
        ]
        prompt_text = self._render(state.tokenizer, messages, add_generation_prompt=True)
        prompt_token_ids = state.tokenizer.encode(prompt_text, add_special_tokens=False)
        response_token_ids, loss_mask = [], []
        info = dict(env_response.info)
        res = InteractionResult(prompt=prompt_text, reward=0.0, messages=messages, info=info)

        for _step in range(max_num_steps):
            text_input = self._render(state.tokenizer, messages, add_generation_prompt=True)
            output = await post(url, {"text": text_input, "sampling_params": self.sampling_params})

            if output["meta_info"]["finish_reason"]["type"] == "abort":
                res.status = Status.ABORTED
                break

            response = output["text"]
            if response.endswith("<|im_end|>"):
                response = response[: -len("<|im_end|>")]
            success, text, calls = parse_tools(response)
            if not success:
                res.status = Status.ABORTED
                break

            messages.append({"role": "assistant", "content": response})
            new_ids, new_mask = self._get_token_delta(state.tokenizer, messages)
            response_token_ids += new_ids
            loss_mask += new_mask

            action = call_to_action(calls, text)
            env_response = await env.step(action)
            info["actions"] = [*info["actions"], action.name]
            info.update(env_response.info)
            res.reward = env_response.reward
            if env_response.done:
                res.status = Status.COMPLETED
                break

            role = "user" if action.name == RESPOND_ACTION_NAME else "tool"
            messages.append({"role": role, "content": env_response.observation})
            new_ids, new_mask = self._get_token_delta(state.tokenizer, messages)
            response_token_ids += new_ids
            loss_mask += new_mask
        else:
            res.status = Status.TRUNCATED

        res.info = {**info, "messages": messages}
        res.tokens = prompt_token_ids + response_token_ids
        res.loss_mask = loss_mask
        res.response = state.tokenizer.decode(response_token_ids)
        res.response_length = len(response_token_ids)
        return res
