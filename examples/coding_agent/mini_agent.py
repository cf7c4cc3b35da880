"""A coding agent of a hundred lines, with nothing but Python: it asks an OpenAI endpoint and does what the model calls.

python mini_agent.py [--max-turns N] < prompt

Tools: `read` shows a file with its lines numbered, `edit` replaces one line and runs the tests. It works in the current
folder and ends when the model calls no tool. OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL say whom it asks.
"""

import http.client
import json
import os
import subprocess
import sys
from urllib.parse import urlsplit

PATH = {"path": {"type": "string"}}
TOOLS = [
    {"name": "read", "description": "Show a file.", "parameters": {"type": "object", "properties": PATH}},
    {
        "name": "edit",
        "description": "Replace a line of a file and run the tests.",
        "parameters": {
            "type": "object",
            "properties": {**PATH, "line": {"type": "integer"}, "text": {"type": "string"}},
        },
    },
]
TEST_COMMAND = [sys.executable, "-S", "-E", "-B", "run_tests.py"]
MOST_BYTES = 4000


def main() -> int:
    turns = int(sys.argv[sys.argv.index("--max-turns") + 1]) if "--max-turns" in sys.argv else 8
    ask = Endpoint(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ.get("OPENAI_MODEL", "model"))
    messages = [{"role": "user", "content": sys.stdin.read().strip()}]
    for _ in range(turns):
        answer = ask(messages)
        messages.append(answer)
        print(json.dumps(answer), flush=True)
        if not answer.get("tool_calls"):
            return 0
        for call in answer["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": perform(call["function"])})
            print(json.dumps(messages[-1]), flush=True)
    return 0


class Endpoint:
    """One connection to an OpenAI endpoint."""

    def __init__(self, base_url: str, key: str, model: str) -> None:
        url = urlsplit(base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "", url.port, timeout=600)
        self._path, self._key, self._model = f"{url.path}/chat/completions", key, model

    def __call__(self, messages: list) -> dict:
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        body = json.dumps({"model": self._model, "messages": messages, "tools": tools})
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._connection.request("POST", self._path, body, headers)
        response = self._connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            sys.exit(f"the endpoint answered {response.status}: {text[:500]}")
        message = json.loads(text)["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}


def perform(function: dict) -> str:
    """What a call gives; a mistake of the model is an answer like any other."""
    try:
        arguments = json.loads(function["arguments"])
        if function["name"] == "read":
            return numbered(arguments["path"])
        if function["name"] == "edit":
            return edit(arguments["path"], arguments["line"], arguments["text"])
        return f"there is no tool {function['name']}"
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"error: {error}"


def lines_of(path: str) -> list:
    """The lines as Python and git count them; everything else that a file may hold stays in them."""
    with open(path, newline="\n") as file:
        return file.read().removesuffix("\n").split("\n")


def numbered(path: str) -> str:
    return "\n".join(f"{number} {line}" for number, line in enumerate(lines_of(path), 1))[:MOST_BYTES]


def edit(path: str, line: int, text: str) -> str:
    lines = lines_of(path)
    if not 1 <= int(line) <= len(lines):
        return f"error: {path} has {len(lines)} lines"
    lines[int(line) - 1] = text
    with open(path, "w", newline="\n") as file:
        file.write("\n".join(lines) + "\n")
    done = subprocess.run(TEST_COMMAND, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout.strip().splitlines() or ["error: the tests said nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main())
