"""Several agent server processes of one run: sessions are pinned to them by their keys."""

import asyncio
import itertools
import os
import signal
import zlib
from types import SimpleNamespace

import aiohttp
import pytest

from slime.agent.remote_session import agent_server, open_session
from slime.agent.server.supervisor import MOST_SERVERS, server_count
from slime.data.sample import Sample
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Play, Turn
from tests.agent.test_server import ASK, CALL, PARAMS, TOOL, post, said_at_once, sample_of, sampled_of, streamed


def settings(**fields):
    usual = {"agent_server_port": None, "agent_public_url": None, "live_judge_path": None}
    return SimpleNamespace(**{**usual, "rollout_batch_size": 32, "n_samples_per_prompt": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "cores", "count"),
    [
        ({}, 16, MOST_SERVERS),
        ({}, 8, 2),
        ({}, 2, 1),
        ({"rollout_batch_size": 5}, 64, 2),
        ({"agent_server_port": 8000}, 64, 1),
        ({"agent_public_url": "http://here:1"}, 64, 1),
        ({"live_judge_path": "judge.py:judge"}, 64, 1),
    ],
)
def test_servers_follow_cores_and_batch_unless_clients_know_an_address(fields, cores, count):
    assert server_count(settings(**fields), cores) == count


def test_sessions_are_pinned_by_key_and_engine_changes_reach_every_process(
    agent_folder, agent_tokenizer, play, tmp_path, monkeypatch
):
    monkeypatch.setattr("slime.agent.server.supervisor.run_identity", lambda *_: {"run": "this"})
    monkeypatch.setattr("slime.agent.server.supervisor.server_count", lambda *_: 2)
    numbers = itertools.count()
    monkeypatch.setattr("slime.agent.remote_session.secrets.token_urlsafe", lambda size: f"key-{next(numbers)}")
    spoken = [Turn.of(agent_tokenizer, "the answer is 46", seed=1)]
    (_, first_url), (second, second_url) = play(spoken), play(spoken)
    runtime = make_agent_runtime(agent_folder, tmp_path, [first_url])
    runtime.journal = object()

    async def run():
        places = {}
        while len(places) < 2:  # consecutive keys have different checksums
            async with open_session(runtime.plugin_args, sample_of(), PARAMS) as session:
                places[zlib.crc32(session.key.encode()) % 2] = session.url
                status, _ = await post(session, {"messages": [ASK]})
                assert status == 200
                [sample] = await session.finish(1.0)
                assert sampled_of(sample) == list(spoken[0].ids)
        assert len(set(places.values())) == 2
        runtime.pool.add(second_url)
        runtime.pool.set_up(second_url)
        runtime.pool.set_down(first_url)
        reached = set()
        while len(reached) < 2:
            async with open_session(runtime.plugin_args, sample_of(), PARAMS) as session:
                own, session.url = session.url, next(url for url in places.values() if url != session.url)
                assert (await post(session, {"messages": [ASK]}))[0] == 401  # this process does not have the session
                session.url, asked = own, len(second.requests)
                while len(second.requests) == asked:  # the change is reported soon
                    assert (await post(session, {"messages": [ASK]}))[0] == 200
                reached.add(own)
                assert (await agent_server(runtime).running(session.key)).remote.url == own
        return reached == set(places.values())

    try:
        assert runtime.run(run())
    finally:
        runtime.close()
    assert (tmp_path / "logs" / "agent-server.log").exists()
    assert (tmp_path / "logs" / "agent-server-1.log").exists()


def test_sessions_of_several_processes_resume_from_one_journal_after_a_kill(
    agent_folder, agent_tokenizer, play, tmp_path, monkeypatch
):
    """One process is killed in the middle of its turns, then the run ends; all sessions continue in a new run."""
    tasks, servers = range(8), iter((3, 2))
    monkeypatch.setattr("slime.agent.server.supervisor.run_identity", lambda *_: {"run": "this"})
    monkeypatch.setattr("slime.agent.server.supervisor.server_count", lambda *_: next(servers))
    keys = itertools.count()
    monkeypatch.setattr("slime.agent.remote_session.secrets.token_urlsafe", lambda size: f"key-{next(keys)}")
    turns = [
        (
            Turn.of(agent_tokenizer, f"sum {number}:{CALL}", seed=number),
            Turn.of(agent_tokenizer, f"it is {number}", seed=10 + number, hold_after=2),
        )
        for number in tasks
    ]
    engine, url = play(*(Play(own, mark=f"task {number}.") for number, own in enumerate(turns)))
    said = {}

    def asking(number):
        ask = {"role": "user", "content": f"task {number}."}
        answer = said.get(number)
        if answer is None:
            return {"messages": [ask], "tools": [TOOL]}
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "46"}
        return {"messages": [ask, answer, result], "tools": [TOOL]}

    def in_sessions(use, **options):
        runtime = make_agent_runtime(agent_folder, tmp_path, [url])
        runtime.journal = object()

        async def one(number):
            sample = Sample(prompt="x", index=number, group_index=number)
            async with open_session(runtime.plugin_args, sample, PARAMS, **options) as session:
                return await use(runtime, number, session)

        async def run():
            return await asyncio.gather(*map(one, tasks), return_exceptions=True)

        try:
            return runtime.run(run())
        finally:
            runtime.close()

    killed = {}

    async def cut_short(runtime, number, session):
        said[number] = await said_at_once(session, asking(number))
        second = asyncio.ensure_future(streamed(session, asking(number)))
        while len(engine.requests) < 2 * len(tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.holding.wait)
        running = await agent_server(runtime).running(session.key)
        if number == 0:
            os.kill(running.child.child_pid(), signal.SIGKILL)
            await running.died.wait()
            engine.release()
        try:
            await second
        except aiohttp.ClientError:
            killed[number] = session.url
        raise asyncio.CancelledError  # the end of the run, as a crash of the driver would be for the journal

    assert all(isinstance(end, asyncio.CancelledError) for end in in_sessions(cut_short))
    assert 0 in killed
    assert len(killed) < len(tasks)
    assert len(set(killed.values())) == 1

    async def go_on(runtime, number, session):
        assert session.resumed_turns == (1 if number in killed else 2)
        if number in killed:
            await streamed(session, asking(number))
        return session.url, await session.finish(1.0)

    ends = in_sessions(go_on, resume=True)
    assert len({url for url, _ in ends}) == 2
    for number, (_, [sample]) in enumerate(ends):
        assert sampled_of(sample) == [*turns[number][0].ids, *turns[number][1].ids]
        assert sample.metadata["session"]["turns"] == 2
        assert sample.metadata["session"]["retokenised_tokens"] == 0
    assert not engine.complaints
