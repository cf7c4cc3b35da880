"""The official SDKs against the endpoints of a run, over several turns with parallel calls.

The sample has exactly the sampled tokens, for each API, streamed or not; clients send each answer back as the SDK
returned it.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from slime.agent.remote_session import open_session
from slime.data.chat_template import load_tokenizer
from slime.data.sample import Sample
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn, log_prob
from tests.migration.scripted import CHAT_TEMPLATE
from tests.tiny_models import VOCAB, make_tokenizer

PARAMS = {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 400, "stop": None, "stop_token_ids": None}
THINKS = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}
SAID = (
    "<think>\ntwo sums, é\n</think>\n\nAdding both.\n"
    '<tool_call>{"name": "add", "arguments": {"a": 12, "note": "caf\\u00e9 \\"x\\""}}</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {"a": 34}}</tool_call>',
    '<think>\nonce more\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>',
    "The answer is 53.",
)
RESULTS = ("12 <|im_end|> </think>", "34", "7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model folder without weights: a config.json and a tokenizer whose template renders tools and reasoning."""
    path = tmp_path_factory.mktemp("thinking_model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ message.content or '' }}", THINKS + "{{ message.content or '' }}"
    )
    tokenizer.save_pretrained(path)
    facts = {"model_type": "qwen3", "max_position_embeddings": 4096, "vocab_size": VOCAB}
    (path / "config.json").write_text(json.dumps(facts))
    return str(path)


@pytest.fixture(scope="module")
def run(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`run(client)` awaits `client(session)`; returns the samples, the scripted turns, the engine and its result."""
    tokenizer = load_tokenizer(folder)
    turns = [Turn.of(tokenizer, text, seed=seed) for seed, text in enumerate(SAID)]
    engine = ScriptedEngine(Script(tokenizer))

    def go(client: Any, **options: Any) -> SimpleNamespace:
        engine.script = Script(tokenizer, [turns])
        engine.requests.clear()

        async def used() -> Any:
            sample = Sample(prompt="add", index=3, group_index=1)
            async with open_session(runtime.plugin_args, sample, PARAMS, **options) as session:
                returned = await client(session)
                return returned, await session.finish(reward=1.0)

        returned, samples = runtime.run(used())
        return SimpleNamespace(samples=samples, turns=turns, engine=engine, returned=returned)

    with engine.serving() as url:
        runtime = make_agent_runtime(folder, tmp_path_factory.mktemp("run"), [url])
        yield go
        runtime.close()


class Chat:
    """Client of Chat Completions: appends the message as the SDK returned it."""

    def __init__(self, session: Any) -> None:
        self.client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
        self.asking: dict[str, Any] = {"model": session.model, "messages": [{"role": "user", "content": "add"}]}
        self.asking["tools"] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        self.reasonings: list[str | None] = []

    async def say(self, stream: bool) -> tuple[str, list[tuple[str, str, Any]]]:
        if stream:
            async with self.client.chat.completions.stream(**self.asking) as events:
                async for _ in events:
                    pass
                completion: Any = await events.get_final_completion()
        else:
            completion = await self.client.chat.completions.create(**self.asking)
        message = completion.choices[0].message
        self.asking["messages"].append(message)
        self.reasonings.append(getattr(message, "reasoning_content", None))
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []
        ]
        assert completion.choices[0].finish_reason == ("tool_calls" if calls else "stop")
        return message.content or "", calls

    def answer(self, id_: str, text: str) -> None:
        self.asking["messages"].append({"role": "tool", "tool_call_id": id_, "content": text})


class Responses:
    """Client of Responses: appends the output to the input."""

    def __init__(self, session: Any) -> None:
        self.client = openai.AsyncOpenAI(base_url=session.openai_url, api_key=session.key, max_retries=0)
        self.asking: dict[str, Any] = {"model": session.model, "input": [{"role": "user", "content": "add"}]}
        self.asking["tools"] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
        self.asking |= {"store": False, "include": ["reasoning.encrypted_content"]}
        self.reasonings: list[str | None] = []

    async def say(self, stream: bool) -> tuple[str, list[tuple[str, str, Any]]]:
        if stream:
            async with self.client.responses.stream(**self.asking) as events:
                async for _ in events:
                    pass
                response: Any = await events.get_final_response()
        else:
            response = await self.client.responses.create(**self.asking)
        self.asking["input"] += response.output
        thoughts = [item.content[0].text for item in response.output if item.type == "reasoning"]
        self.reasonings.append(thoughts[0] if thoughts else None)
        calls = [item for item in response.output if item.type == "function_call"]
        return response.output_text, [(call.call_id, call.name, json.loads(call.arguments)) for call in calls]

    def answer(self, id_: str, text: str) -> None:
        self.asking["input"].append({"type": "function_call_output", "call_id": id_, "output": text})


class Messages:
    """Client of Anthropic's Messages: sends the content back unchanged, and results in one user message."""

    def __init__(self, session: Any) -> None:
        self.client = anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key=session.key, max_retries=0)
        self.asking: dict[str, Any] = {"model": session.model, "messages": [{"role": "user", "content": "add"}]}
        self.asking |= {"max_tokens": 300, "tools": [{"name": "add", "input_schema": SCHEMA}]}
        self.reasonings: list[str | None] = []

    async def say(self, stream: bool) -> tuple[str, list[tuple[str, str, Any]]]:
        if stream:
            async with self.client.messages.stream(**self.asking) as events:
                message: Any = await events.get_final_message()
        else:
            message = await self.client.messages.create(**self.asking)
        self.asking["messages"].append({"role": "assistant", "content": message.content})
        thoughts = [block.thinking for block in message.content if block.type == "thinking"]
        self.reasonings.append(thoughts[0] if thoughts else None)
        calls = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        return "".join(block.text for block in message.content if block.type == "text"), calls

    def answer(self, id_: str, text: str) -> None:
        if self.asking["messages"][-1]["role"] == "assistant":
            self.asking["messages"].append({"role": "user", "content": []})
        block = {"type": "tool_result", "tool_use_id": id_, "content": text}
        self.asking["messages"][-1]["content"].append(block)


def sampled_tokens(sample: Sample) -> list[int]:
    mask = np.array(sample.loss_mask, dtype=bool)
    return np.array(sample.tokens[-sample.response_length :])[mask].tolist()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", [Chat, Responses, Messages])
def test_sample_has_the_sampled_tokens_of_turns_with_parallel_calls(run: Any, api: type, stream: bool) -> None:
    async def client(session: Any) -> Any:
        agent = api(session)
        results = iter(RESULTS)
        said = []
        while True:
            text, calls = await agent.say(stream)
            said.append((text.strip(), [(name, arguments) for _, name, arguments in calls]))
            if not calls:
                await agent.client.close()
                return said, [thought and thought.strip() for thought in agent.reasonings]
            for id_, _, _ in calls:
                agent.answer(id_, next(results))

    done = run(client)
    said, reasonings = done.returned
    assert said == [
        ("Adding both.", [("add", {"a": 12, "note": 'café "x"'}), ("add", {"a": 34})]),
        ("", [("add", {"a": 7})]),
        ("The answer is 53.", []),
    ]
    assert reasonings == ["two sums, é", "once more", None]
    [sample] = done.samples
    assert sampled_tokens(sample) == [token for turn in done.turns for token in turn.ids]
    assert sample.tokens == [*done.engine.requests[-1].input_ids.tolist(), *done.turns[-1].ids]
    mask = np.array(sample.loss_mask, dtype=bool)
    expected = np.float32([log_prob(token) for token in sampled_tokens(sample)])
    np.testing.assert_array_equal(np.float32(sample.rollout_log_probs)[mask], expected)
    counted = sample.metadata["session"]
    assert (counted["turns"], counted["extended"], counted["forked"], counted["samples"]) == (3, 3, 0, 1)
    assert counted["retokenised_tokens"] == 0
    assert counted["trained_tokens"] == sum(len(turn.ids) for turn in done.turns)
    assert done.engine.complaints == []


def test_model_lists_token_counts_and_usage_agree(run: Any) -> None:
    async def client(session: Any) -> Any:
        messages, chat = Messages(session), Chat(session)
        listed = [model.id async for model in messages.client.models.list()]
        assert listed == [model.id async for model in chat.client.models.list()]
        assert (await chat.client.models.retrieve(session.model)).id == session.model
        asking = {name: messages.asking[name] for name in ("model", "messages", "tools")}
        tokens = (await messages.client.messages.count_tokens(**asking)).input_tokens
        message = await messages.client.messages.create(**messages.asking)
        responses = Responses(session)
        counted = await responses.client.responses.input_tokens.count(
            **{name: responses.asking[name] for name in ("model", "input", "tools")}
        )
        for api in (messages, chat, responses):
            await api.client.close()
        return listed, tokens, counted.input_tokens, message.usage

    done = run(client)
    listed, tokens, counted, usage = done.returned
    assert len(listed) == 1
    assert tokens == counted == len(done.engine.requests[0].input_ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == tokens
    assert usage.output_tokens == len(done.turns[0].ids)


def test_log_probs_match_the_sampled_tokens(run: Any) -> None:
    async def client(session: Any) -> Any:
        chat = Chat(session)
        completion = await chat.client.chat.completions.create(**chat.asking, logprobs=True)
        await chat.client.close()
        return completion.choices[0].logprobs.content

    done = run(client)
    assert [entry.logprob for entry in done.returned] == pytest.approx([log_prob(i) for i in done.turns[0].ids])
    said = b"".join(bytes(entry.bytes) for entry in done.returned)
    assert said.decode() == f"{SAID[0]}<|im_end|>"
    assert b"\xc3" in [bytes(entry.bytes) for entry in done.returned]  # first byte of é


def test_sdks_do_not_retry_a_finished_session(run: Any) -> None:
    """The SDKs' own retries are enabled, but they make none."""

    async def client(session: Any) -> Any:
        first = Chat(session)
        await first.say(stream=False)
        statuses = []
        for api in (Chat, Responses, Messages):
            agent = api(session)
            agent.client = agent.client.with_options(max_retries=5)
            with pytest.raises(
                (openai.APIStatusError, anthropic.APIStatusError), match="has reached its limit of 1 turns"
            ) as got:
                await agent.say(stream=True)
            statuses.append(got.value.status_code)
            await agent.client.close()
        await first.client.close()
        return statuses

    done = run(client, max_turns=1)
    assert done.returned == [404, 400, 400]
    assert len(done.engine.requests) == 1
