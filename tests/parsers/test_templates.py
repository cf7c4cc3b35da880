"""Assistant turns written by the chat template of a family are read by its parsers."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from slime.agent.messages import Message, TurnRequest
from slime.agent.session.template import ChatModel
from slime.errors import UserError
from slime.models.parsers.events import gathered
from slime.models.parsers.formats import Formats, detect_formats, make_parser, opens_reasoning
from tests.agent.families import FAMILIES, family_tokenizer

FORMATS = {
    "deepseek_r1": Formats("deepseekv3", "deepseek-r1"),
    "deepseek_v3": Formats("deepseekv3", None),
    "gemma3": Formats(),
    "gemma4": Formats(),
    "glm4": Formats(),
    "glm4_5": Formats("glm45", "glm45"),
    "gpt_oss": Formats("gpt-oss", "gpt-oss"),
    "kimi_k2": Formats("kimi_k2", None),
    "llama3": Formats("llama3", None),
    "llama3_1": Formats("llama3", None),
    "marked": Formats(),
    "mistral": Formats("mistral", None),
    "nemotron": Formats("qwen3_coder", "qwen3"),
    "plain": Formats(),
    "qwen2_5": Formats("hermes", None),
    "qwen3": Formats("hermes", "qwen3"),
    "qwen3_5": Formats("qwen3_coder", "qwen3"),
    "qwen3_coder": Formats("qwen3_coder", None),
    "qwen3_instruct": Formats("hermes", None),
}
"""No parser reads the calls of GLM-4 and Gemma 4; Gemma 3's template renders no tools."""
PROPERTIES = {"what": {"type": "string"}, "count": {"type": "integer"}, "some": {"type": "array"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "d",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}
ARGUMENTS = [{"what": 'say "hi"\n to <b> & é', "count": 3}, {"some": [1, "two", {"three": None}]}]


def test_formats_of_every_family_template() -> None:
    assert {name: detect_formats(family_tokenizer(name).chat_template) for name in FAMILIES} == FORMATS


@pytest.mark.parametrize(
    "family", [name for name, formats in FORMATS.items() if formats.tool and name != "deepseek_r1"]
)
def test_parsers_read_calls_written_by_the_template(family: str) -> None:
    """Excludes DeepSeek-R1, whose template omits from the history the reasoning that its prompts start."""
    tokenizer, formats = family_tokenizer(family), FORMATS[family]
    made = ARGUMENTS[:1] if family in ("llama3", "llama3_1", "gpt_oss") else ARGUMENTS  # one call per turn
    calls = [
        {
            "id": f"functions.look_up:{place}" if family == "kimi_k2" else "abcDEF123",
            "type": "function",
            "function": {
                "name": "look_up",
                "arguments": json.dumps(arguments) if family == "deepseek_v3" else arguments,
            },
        }
        for place, arguments in enumerate(made)
    ]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    begun = prompt if whole.startswith(prompt) else prompt.rstrip()
    assert whole.startswith(begun)
    parser = make_parser(formats, tools=[TOOL], starts_in_reasoning=opens_reasoning(formats, prompt))
    output = gathered([*parser.feed(whole[len(begun) :]), *parser.end()])
    assert [(call.name, json.loads(call.arguments)) for call in output.calls] == [("look_up", each) for each in made]
    assert (output.text, output.ill_formed) == ("", False)


def test_named_formats_override_the_template() -> None:
    tokenizer = family_tokenizer("qwen3")
    assert ChatModel(tokenizer).formats[True] == Formats("hermes", "qwen3")
    assert ChatModel(tokenizer, formats=Formats("qwen3_coder")).formats[True] == Formats("qwen3_coder", "qwen3")
    with pytest.raises(UserError, match="hermess"):
        ChatModel(tokenizer, formats=Formats("hermess"))


def test_formats_come_from_the_template_that_renders_the_request() -> None:
    """Command R and Hermes 2 Pro have several named templates. `tool_use` renders requests with tools."""
    tokenizer = copy.deepcopy(family_tokenizer("qwen3"))
    tool_use, plain = (family_tokenizer(name).chat_template for name in ("qwen2_5", "qwen3"))
    tokenizer.chat_template = {"tool_use": tool_use, "default": plain, "rag": "<arg_key>"}
    assert ChatModel(tokenizer).formats == {True: Formats("hermes", None), False: Formats("hermes", "qwen3")}
    tokenizer.chat_template = {"default": tool_use, "rag": "<arg_key>"}
    assert ChatModel(tokenizer).formats == {True: Formats("hermes", None), False: Formats("hermes", None)}
    for none in (None, {"rag": "<arg_key>"}):
        tokenizer.chat_template = none
        assert ChatModel(tokenizer).formats == {True: Formats(), False: Formats()}


@pytest.mark.parametrize(
    ("family", "warning"),
    [
        ("gemma3", "does not render tools"),
        ("plain", "does not render tools"),
        ("glm4", "in an unknown format"),
        ("gemma4", "in an unknown format"),
        ("llama3", None),
        ("qwen3", None),
    ],
)
def test_warns_once_if_tool_calls_of_the_template_are_not_parsed(
    family: str, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def parse(**fields: Any) -> None:
        request = TurnRequest((Message("user", "hi"),), **fields)
        model.parser(request, np.array([1]))

    model = ChatModel(family_tokenizer(family))
    parse()
    parse(tools=(TOOL,), tool_choice="none")
    assert (model.warning, caplog.messages) == (None, [])
    parse(tools=(TOOL,))
    parse(tools=(TOOL,))
    assert caplog.messages == ([] if warning is None else [model.warning])
    assert warning is None or (warning in caplog.text and "--sglang-tool-call-parser" in caplog.text)
    caplog.clear()
    model = ChatModel(family_tokenizer(family), formats=Formats("pythonic"))
    parse(tools=(TOOL,))
    assert caplog.messages == []
