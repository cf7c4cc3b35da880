"""Several agent server processes of one run: sessions are pinned to them by their keys."""

import itertools
import zlib
from types import SimpleNamespace

import pytest

from slime.agent.remote_session import agent_server, open_session
from slime.agent.server.supervisor import MOST_SERVERS, server_count
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Turn
from tests.agent.test_server import ASK, PARAMS, post, sample_of, sampled_of


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
