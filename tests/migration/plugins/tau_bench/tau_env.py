"""A shop with orders, tools that change them, and a customer who is played by a model."""

import copy
import dataclasses
import os

import aiohttp

RESPOND_ACTION_NAME = "respond"
STOP = "###STOP###"
WIKI = "You serve the customers of a shop. Do what they ask for."

TASKS = [
    {"user_id": f"user_{number}", "instruction": f"cancel order {number}", "order_id": str(number)}
    for number in range(8)
]

TOOLS_INFO = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
        },
    }
    for name, description in (("get_order", "Look an order up."), ("cancel_order", "Cancel an order."))
]


@dataclasses.dataclass
class Action:
    name: str
    kwargs: dict


@dataclasses.dataclass
class EnvResponse:
    observation: str
    reward: float
    done: bool
    info: dict


class UserSimulator:
    """The customer: a model of its own, behind an OpenAI-compatible server."""

    def __init__(self):
        self.url = os.environ["USER_MODEL_URL"]
        self.messages = []

    async def reset(self, instruction):
        self.messages = [{"role": "system", "content": f"You are a customer. {instruction}"}]
        return await self.say("Hi! How can I help you today?")

    async def say(self, content):
        self.messages.append({"role": "user", "content": content})
        body = {"model": "user", "messages": self.messages, "temperature": 1.0, "max_tokens": 16}
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{self.url}/v1/chat/completions", json=body)
            response.raise_for_status()
            message = (await response.json())["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        return message["content"]


class Env:
    tools_info = TOOLS_INFO
    wiki = WIKI

    def __init__(self, task_index):
        self.task = TASKS[task_index]
        self.user = UserSimulator()
        self.data = {}

    async def reset(self):
        self.data = {"orders": {task["order_id"]: "pending" for task in TASKS}}
        self.expected = copy.deepcopy(self.data)
        self.expected["orders"][self.task["order_id"]] = "cancelled"
        observation = await self.user.reset(self.task["instruction"])
        return EnvResponse(observation, 0.0, False, {"user_id": self.task["user_id"], "actions": []})

    async def step(self, action):
        if action.name == RESPOND_ACTION_NAME:
            observation = await self.user.say(action.kwargs["content"])
            done = STOP in observation
        else:
            observation, done = self.use_tool(action), False
        reward = float(done and self.data == self.expected)
        return EnvResponse(observation, reward, done, {"orders": dict(self.data["orders"])})

    def use_tool(self, action):
        order = action.kwargs.get("order_id") or self.task["order_id"]
        if order not in self.data["orders"]:
            return f"Error: there is no order {order}"
        if action.name == "get_order":
            return f"order {order} is {self.data['orders'][order]}"
        if action.name == "cancel_order":
            self.data["orders"][order] = "cancelled"
            return f"order {order} is cancelled"
        return f"Error: there is no tool {action.name}"
