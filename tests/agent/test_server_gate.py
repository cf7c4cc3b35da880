"""Sessions between two rollouts: held at the gate, given up or resumed; keep-alives for waiting clients."""

import asyncio
import concurrent.futures

import aiohttp
import pytest
from aiohttp import web

from slime.agent.remote_session import open_session
from slime.agent.server import app
from slime.agent.server.app import AgentApp
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import Opening
from slime.agent.session.template import ChatModel
from slime.cluster.http_server import Connections
from slime.engine.http.pool import EnginePool
from slime.rollout.gate import SampleClock, Ticket, as_evaluation
from slime.rollout.outcomes import GivenUp
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn
from tests.agent.test_server import ASK, CALL, PARAMS, TOOL, post, said_at_once, sample_of, sampled_of, streamed


@pytest.fixture(scope="module")
def shared(agent_folder, agent_tokenizer, tmp_path_factory):
    engine = ScriptedEngine(Script(agent_tokenizer))
    with engine.serving() as url:
        runtime = make_agent_runtime(agent_folder, tmp_path_factory.mktemp("run"), [url])
        yield engine, runtime
        runtime.close()


@pytest.fixture
def says(shared, agent_tokenizer):
    engine, runtime = shared

    def play(*turns):
        engine.script = Script(agent_tokenizer, [turns])
        engine.requests.clear()
        engine.holding.clear()
        engine.weight_version = "1"
        return engine, runtime

    return play


def with_ticket(runtime, coro, *, masks=False):
    """Run the coroutine as the task of a group that holds a ticket."""
    ticket = Ticket(runtime.state.gate, masks=masks)

    async def start():
        return await asyncio.get_running_loop().create_task(coro, context=ticket.context())

    return runtime.run(start())


async def pause_at_gate(runtime, engine):
    """Close the gate as a complete rollout does, publish version 2, and open the gate."""
    await asyncio.to_thread(engine.holding.wait)
    runtime.state.gate.close()
    await asyncio.wait_for(runtime.state.gate.wait_until_idle(), 120)
    seats = runtime.semaphore._value
    engine.weight_version = "2"
    asked = len(engine.requests)
    runtime.state.gate.open()
    return asked, seats


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_session_at_the_gate_resumes_with_new_weights(says, agent_tokenizer, masks, streams):
    first = Turn.of(agent_tokenizer, f"the sum:{CALL}", seed=1)
    second = Turn.of(agent_tokenizer, "the answer is 46", seed=2, hold_after=5)
    engine, runtime = says(first, second)

    async def use():
        async with runtime.semaphore, open_session(runtime.plugin_args, sample_of(), PARAMS) as session:
            said = await said_at_once(session, {"messages": [ASK], "tools": [TOOL]})
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "46"}
            body = {"messages": [ASK, said, result], "tools": [TOOL]}
            asking = asyncio.ensure_future((streamed if streams else post)(session, body))
            asked, seats = await pause_at_gate(runtime, engine)
            await asking
            return asked, seats, await session.finish(1.0)

    free = runtime.semaphore._value
    asked, seats, [sample] = with_ticket(runtime, use(), masks=masks)
    assert asked == 2  # no request reached the engine while the gate was closed
    assert seats == free  # the slot of the semaphore was released
    assert runtime.semaphore._value == free
    last = engine.requests[-1]
    assert last.input_ids[-5:].tolist() == list(second.ids[:5])
    assert sample.tokens[-len(second.ids) :] == list(second.ids)
    versions = [version for version, _ in sample.version_spans if version is not None]
    assert versions == ["1", "1", "2"]
    trained = [*second.ids[5:]] if masks else [*first.ids, *second.ids]
    assert sampled_of(sample) == trained


def test_evaluation_is_not_held_at_the_gate(says, agent_tokenizer):
    _, runtime = says(Turn.of(agent_tokenizer, "the answer is 46"))

    async def use():
        runtime.state.gate.close()
        with as_evaluation():
            async with open_session(runtime.plugin_args, sample_of(), PARAMS) as session:
                await post(session, {"messages": [ASK]})
                samples = await session.finish(1.0)
        runtime.state.gate.open()
        return samples

    assert len(runtime.run(use())) == 1


def test_given_up_session_raises_and_closes_its_client_request(says, agent_tokenizer):
    engine, runtime = says(Turn.of(agent_tokenizer, "the answer is 46", hold_after=3))
    answers = []

    async def use():
        async with open_session(runtime.plugin_args, sample_of(), PARAMS) as session:
            asking = asyncio.ensure_future(post(session, {"messages": [ASK]}))
            await asyncio.to_thread(engine.holding.wait)
            runtime.state.gate.close()
            answers.append(await asking)
            raise ValueError("the agent ended with exit code 1")

    with pytest.raises(GivenUp):
        runtime.run(use())
    runtime.state.gate.open()
    [(status, answer)] = answers
    assert (status, answer["error"]["code"]) == (404, "closed")


def test_turns_of_an_interrupted_attempt_are_resumed(agent_folder, agent_tokenizer, play, tmp_path, monkeypatch):
    monkeypatch.setattr("slime.agent.server.supervisor.run_identity", lambda *_: {"run": "this"})
    spoken = [Turn.of(agent_tokenizer, f"the sum:{CALL}", seed=1), Turn.of(agent_tokenizer, "it is 46", seed=2)]
    _, url = play(spoken)
    said = []

    def life(use, **options):
        runtime = make_agent_runtime(agent_folder, tmp_path, [url])
        runtime.journal = object()

        async def run():
            async with open_session(runtime.plugin_args, sample_of(), PARAMS, **options) as session:
                return await use(runtime, session)

        try:
            return runtime.run(run())
        finally:
            runtime.close()

    async def cut_short(runtime, session):
        said.append(await said_at_once(session, {"messages": [ASK], "tools": [TOOL]}))
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        life(cut_short)

    async def go_on(runtime, session):
        assert session.resumed_turns == 1
        assert [message.role for message in await session.turns()] == ["user", "assistant"]
        result = {"role": "tool", "tool_call_id": said[0]["tool_calls"][0]["id"], "content": "46"}
        await said_at_once(session, {"messages": [ASK, said[0], result], "tools": [TOOL]})
        samples = await session.finish(1.0)
        for told in runtime.when_recorded:
            await told(sample_of())
        return samples

    [sample] = life(go_on, resume=True)
    assert sampled_of(sample) == [*spoken[0].ids, *spoken[1].ids]

    async def nothing_left(runtime, session):
        return session.resumed_turns

    assert life(nothing_left, resume=True) == 0


def test_timed_out_session_answers_its_client_and_can_be_resumed(
    agent_folder, agent_tokenizer, play, tmp_path, monkeypatch
):
    monkeypatch.setattr("slime.agent.server.supervisor.run_identity", lambda *_: {"run": "this"})
    spoken = [Turn.of(agent_tokenizer, f"the sum:{CALL}"), Turn.of(agent_tokenizer, "it is 46", hold_after=2)]
    engine, url = play(spoken)
    runtime = make_agent_runtime(agent_folder, tmp_path, [url])
    runtime.journal = object()
    told = []

    async def out_of_time():
        async with SampleClock(1000.0).running("f") as _, open_session(args, sample_of(), PARAMS) as session:
            said = await said_at_once(session, {"messages": [ASK], "tools": [TOOL]})
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "46"}
            body = {"messages": [ASK, said, result], "tools": [TOOL]}
            told.append((asyncio.ensure_future(post(session, body)), body))
            await asyncio.to_thread(engine.holding.wait)
            asyncio.current_task().cancel()  # as the sample clock does
            await asyncio.sleep(60)

    async def run():
        trying = asyncio.ensure_future(out_of_time())
        with pytest.raises(asyncio.CancelledError):
            await trying
        asking, body = told[0]
        status, answer = await asking
        async with open_session(args, sample_of(), PARAMS, resume=True) as session:
            assert session.resumed_turns == 1
            await said_at_once(session, body)
            return status, answer, await session.finish(1.0)

    args = runtime.plugin_args
    try:
        status, answer, [sample] = runtime.run(run())
    finally:
        runtime.close()
    assert (status, answer["error"]["code"]) == (404, "deadline")
    assert sampled_of(sample) == [*spoken[0].ids, *spoken[1].ids]


def test_stream_sends_keep_alives_while_the_engine_is_silent(agent_tokenizer, play, monkeypatch):
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.02)
    engine, url = play([Turn.of(agent_tokenizer, "the answer is 46", hold_after=1)])

    async def run():
        pool = EnginePool([url])
        sessions = Sessions(ChatModel(agent_tokenizer), pool)
        sessions.open(Opening(key="k", params=PARAMS))
        runner = web.AppRunner(
            AgentApp(sessions, agent_tokenizer, ["m"], Connections(16)).app, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
        body = {"model": "m", "stream": True, "messages": [ASK]}
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as http,
            http.post(address, json=body) as response,
        ):
            heard = b""
            while heard.count(b"\n:") < 2:  # keep-alives, while the engine holds its first token
                heard += await response.content.readany()
            engine.release()
            heard += await response.read()
        await runner.cleanup()
        await pool.aclose()
        return response.status, heard

    status, heard = asyncio.run(run())
    assert status == 200
    assert heard.endswith(b"data: [DONE]\n\n")
