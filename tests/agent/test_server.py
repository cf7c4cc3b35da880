"""Sessions behind the endpoints, in the server process of a run: HTTP requests become exact tokens."""

import asyncio
import json
import os
import signal
import socket

import aiohttp
import numpy as np
import pytest

from slime.agent.remote_session import NoTurns, agent_server, open_session
from slime.agent.server.control import AgentServerFailed
from slime.data.sample import Sample
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn, log_prob
from tests.e2e.runs import wait_until

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'
PARAMS = {
    "temperature": 0.7,
    "top_p": 1.0,
    "max_new_tokens": 400,
    "sampling_seed": 7,
    "stop": None,
    "stop_token_ids": None,
}
ASK = {"role": "user", "content": "what is 12+34?"}


def sample_of(**fields):
    return Sample(prompt="what is 12+34?", index=3, group_index=1, **fields)


async def post(session, body, path="/v1/chat/completions", connector=None, **headers):
    """Send a request as a client does; return (status, answer)."""
    async with aiohttp.ClientSession(connector=connector) as http:
        given = {"Authorization": f"Bearer {session.key}", **headers}
        async with http.post(session.url + path, json={"model": session.model, **body}, headers=given) as response:
            return response.status, await response.json()


async def streamed(session, body, path="/v1/chat/completions"):
    """Return the events of a streamed answer."""
    async with aiohttp.ClientSession() as http:
        given = {"Authorization": f"Bearer {session.key}"}
        whole = {"model": session.model, "stream": True, **body}
        async with http.post(session.url + path, json=whole, headers=given) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def sampled_of(sample):
    mask = np.array(sample.loss_mask, dtype=bool)
    return np.array(sample.tokens[-sample.response_length :])[mask].tolist()


def in_session(runtime, use, **options):
    """Run `use(session)` in a session of this runtime; return its result."""

    async def run():
        async with open_session(runtime.plugin_args, sample_of(), PARAMS, **options) as session:
            return await use(session)

    return runtime.run(run())


@pytest.fixture
def spoken(agent_tokenizer):
    return [
        Turn.of(agent_tokenizer, f"the sum:{CALL}", seed=1),
        Turn.of(agent_tokenizer, "the answer is 46", seed=2),
    ]


@pytest.fixture(scope="module")
def shared(agent_folder, agent_tokenizer, tmp_path_factory):
    """An engine and a runtime whose server process is shared by all tests."""
    engine = ScriptedEngine(Script(agent_tokenizer))
    with engine.serving() as url:
        runtime = make_agent_runtime(agent_folder, tmp_path_factory.mktemp("run"), [url])
        yield engine, runtime
        runtime.close()


@pytest.fixture
def says(shared, agent_tokenizer):
    """`says(turn, ...)`: (engine, runtime), where the engine plays these turns."""
    engine, runtime = shared

    def play(*turns):
        engine.script = Script(agent_tokenizer, [turns])
        engine.requests.clear()
        engine.holding.clear()
        return engine, runtime

    return play


@pytest.fixture
def served(says, spoken):
    return says(*spoken)


@pytest.mark.parametrize("streams", [False, True])
def test_client_turns_become_the_sampled_tokens(served, spoken, agent_tokenizer, streams):
    engine, runtime = served

    async def use(session):
        messages = [ASK]
        for turn in range(2):
            body = {"messages": messages, "tools": [TOOL], "temperature": 2.0, "max_tokens": 300}
            message = await (said_in_events if streams else said_at_once)(session, body)
            messages.append(message)
            if not turn:
                [call] = message["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"a": 12}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "46"})
        assert messages[-1]["content"] == "the answer is 46"
        said = await session.turns()
        assert [message.role for message in said] == ["user", "assistant", "tool", "assistant"]
        session.reward(said[1].reference, 0.25)
        return await session.finish(reward=1.0, metadata={"task": "add"})

    [sample] = in_session(runtime, use)
    first, second = engine.requests
    assert sampled_of(sample) == [*spoken[0].ids, *spoken[1].ids]
    assert sample.tokens == [*second.input_ids.tolist(), *spoken[1].ids]
    mask = np.array(sample.loss_mask, dtype=bool)
    expected = np.float32([log_prob(token) for token in sampled_of(sample)])
    np.testing.assert_array_equal(np.float32(sample.rollout_log_probs)[mask], expected)
    assert (sample.status, sample.reward, sample.index) == (Sample.Status.COMPLETED, 1.0, 3)
    assert sample.metadata["task"] == "add"
    assert [reward for _, _, reward in sample.metadata["turn_rewards"]] == [0.25]
    assert sample.metadata["session"]["retokenised_tokens"] == 0
    assert (first.params["temperature"], first.params["max_new_tokens"]) == (0.7, 300)
    assert first.params["sampling_seed"] == 7
    assert second.params["sampling_seed"] != 7


async def said_at_once(session, body):
    status, answer = await post(session, body)
    assert status == 200, answer
    return answer["choices"][0]["message"]


async def said_in_events(session, body):
    message = {"role": "assistant", "content": ""}
    for event in await streamed(session, body):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if call.get("id"):
                    calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_endpoints_answer_on_a_unix_socket_and_on_a_passed_listener(served, spoken):
    _, runtime = served

    async def use(session):
        body = {"messages": [ASK], "tools": [TOOL]}
        status, _ = await post(session, body, connector=aiohttp.UnixConnector(path=session.unix_socket))
        assert status == 200
        assert os.stat(os.path.dirname(session.unix_socket)).st_mode & 0o077 == 0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await session.accept_on(listener)
            session.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            status, _ = await post(session, body)
            assert status == 200
            samples = await session.finish(1.0)
            listener.setblocking(False)
        return samples

    samples = in_session(runtime, use)
    assert [sampled_of(sample) for sample in samples] == [list(spoken[0].ids)] * 2  # the same request twice: two leaves


def test_key_is_valid_only_while_its_session_is_open(served):
    _, runtime = served

    async def use(session):
        body = {"messages": [ASK], "tools": [TOOL]}
        stranger = await post(session, body, Authorization="Bearer guess")
        unknown = await post(session, {**body, "model": "gpt-9"})
        named = await post(session, {**body, "model": "mine"})
        broken = await post(session, {"messages": 3})
        nowhere = await post(session, body, path="/v1/embeddings")
        await session.finish(1.0)
        return stranger, unknown, named, broken, nowhere, await post(session, body)

    answers = in_session(runtime, use, models=["mine"])
    assert [status for status, _ in answers] == [401, 404, 200, 400, 404, 404]
    codes = [answer["error"]["code"] for _, answer in (answers[0], answers[1], answers[5])]
    assert codes == ["invalid_api_key", "model_not_found", "closed"]


def test_turn_limit_answers_the_client_with_404(served):
    _, runtime = served

    async def use(session):
        await post(session, {"messages": [ASK], "tools": [TOOL]})
        status, answer = await post(session, {"messages": [ASK], "tools": [TOOL]})
        return status, answer["error"]["code"], await session.finish(1.0)

    status, code, samples = in_session(runtime, use, max_turns=1)
    assert (status, code, len(samples)) == (404, "turn_limit", 1)


def test_finishing_a_session_without_turns_raises_the_reason(served):
    _, runtime = served

    async def use(session):
        return await session.finish(1.0)

    with pytest.raises(NoTurns, match="sent no request"):
        in_session(runtime, use)


def test_disconnected_client_leaves_only_an_abandoned_turn(says, agent_tokenizer):
    engine, runtime = says(Turn.of(agent_tokenizer, "the answer is 46", hold_after=3))

    async def use(session):
        asking = asyncio.ensure_future(streamed(session, {"messages": [ASK]}))
        await asyncio.to_thread(engine.holding.wait)
        asking.cancel()
        remote = (await agent_server(runtime).running()).remote
        while not (counters := (await remote.call("turns", key=session.key))["counters"])["abandoned"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return counters

    counters = in_session(runtime, use)
    assert (counters["turns"], counters["abandoned"], counters["abandoned_tokens"]) == (0, 1, 3)


def test_a_finished_session_ends_its_stream_with_the_reason(says, agent_tokenizer):
    engine, runtime = says(Turn.of(agent_tokenizer, "the answer is 46", hold_after=3))

    async def use(session):
        asking = asyncio.ensure_future(streamed(session, {"messages": [ASK]}))
        await asyncio.to_thread(engine.holding.wait)
        with pytest.raises(NoTurns):
            await session.finish(1.0)
        return await asking

    events = in_session(runtime, use)
    assert events[-1]["error"]["code"] == "closed"


def test_dead_server_fails_its_sessions_and_is_restarted(served, spoken):
    _, runtime = served
    server = agent_server(runtime)

    async def killed():
        async with open_session(runtime.plugin_args, sample_of(), PARAMS) as session:
            running = await server.running()
            os.kill(running.child.child_pid(), signal.SIGKILL)
            await running.died.wait()
            await post(session, {"messages": [ASK]})  # the server process is dead

    with pytest.raises(AgentServerFailed, match="died"):
        runtime.run(killed())

    async def use(session):
        await post(session, {"messages": [ASK], "tools": [TOOL]})
        return await session.finish(1.0)

    [sample] = in_session(runtime, use)
    assert sampled_of(sample) == list(spoken[0].ids)


def test_closing_the_runtime_ends_the_server_and_removes_its_folder(agent_runtime):
    runtime = agent_runtime("http://127.0.0.1:9")

    async def use(session):
        return os.path.dirname(session.unix_socket), (await agent_server(runtime).running()).child.child_pid()

    folder, pid = in_session(runtime, use)
    assert os.path.exists(folder)
    assert os.path.exists(f"{runtime.args.output_dir}/logs/agent-server.log")
    runtime.close()
    assert not os.path.exists(folder)
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 60)
