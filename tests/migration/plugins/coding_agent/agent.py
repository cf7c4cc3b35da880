"""A small coding agent: asks a model over the OpenAI API, runs the commands it calls, ends when it calls none."""

import json
import os
import subprocess
import sys
import urllib.request

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def complete(messages):
    body = {"model": "slime-actor", "messages": messages, "tools": [BASH], "temperature": 0.1, "max_tokens": 4096}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def main(task):
    messages = [{"role": "user", "content": task}]
    while True:
        message = complete(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            result = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    main(sys.argv[1])
