"""A small agent framework: a model behind an OpenAI-compatible server, python functions as tools, a loop over them."""

import inspect
import json
import re
import uuid

import aiohttp

JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


class MaxTokensReachedException(Exception):
    """The model ran into its limit of tokens."""


class EventLoopException(Exception):
    """The loop over the tools did not end."""


def tool(function):
    """Make a tool of a function: its description and arguments are read off it."""
    parameters = inspect.signature(function).parameters
    function.spec = {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": inspect.getdoc(function),
            "parameters": {
                "type": "object",
                "properties": {name: {"type": JSON_TYPES[p.annotation]} for name, p in parameters.items()},
                "required": list(parameters),
            },
        },
    }
    return function


class OpenAIModel:
    def __init__(self, *, client_args, model_id, params):
        self.client_args = client_args
        self.model_id = model_id
        self.params = params

    async def complete(self, messages, tools):
        body = {"model": self.model_id, "messages": messages, "tools": tools, **self.params}
        headers = {"Authorization": f"Bearer {self.client_args['api_key']}"}
        url = f"{self.client_args['base_url']}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as response:
            response.raise_for_status()
            [choice] = (await response.json())["choices"]
        if choice["finish_reason"] == "length":
            raise MaxTokensReachedException(choice["message"]["content"])
        return self.with_tool_calls(choice["message"])

    def with_tool_calls(self, message):
        """A server without a parser of tool calls leaves them in the text."""
        if message.get("tool_calls"):
            return message
        calls = []
        for text in re.findall(r"<tool_call>(.*?)</tool_call>", message["content"], re.DOTALL):
            call = json.loads(text)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
        if not calls:
            return {"role": "assistant", "content": message["content"]}
        content = re.sub(r"<tool_call>.*?</tool_call>", "", message["content"], flags=re.DOTALL)
        return {"role": "assistant", "content": content, "tool_calls": calls}


class Agent:
    def __init__(self, *, model, tools, system_prompt, max_cycles=6):
        self.model = model
        self.tools = {one.__name__: one for one in tools}
        self.tool_specs = [one.spec for one in tools]
        self.messages = [{"role": "system", "content": system_prompt}]
        self.max_cycles = max_cycles

    async def invoke_async(self, prompt):
        self.messages.append({"role": "user", "content": prompt})
        for _cycle in range(self.max_cycles):
            message = await self.model.complete(self.messages, self.tool_specs)
            self.messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                self.messages.append(await self.tool_result(call))
        raise EventLoopException(f"no answer after {self.max_cycles} cycles")

    async def tool_result(self, call):
        function = self.tools[call["function"]["name"]]
        try:
            result = function(**json.loads(call["function"]["arguments"]))
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 - the model is told what went wrong
            result = f"Error: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": str(result)}
