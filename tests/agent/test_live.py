"""A live service at its entrances: consent, filters, clients that hang up, never come back, send nonsense, or all at
once; and a process that is killed."""

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from slime.agent.client import agent_server
from slime.agent.live.baseline import traffic_baseline
from slime.agent.live.exchange import Exchange, Verdict
from slime.agent.live.service import _InOrder, generate
from slime.agent.live.store import FILE_NAME, ExchangeStore
from slime.data.journal.codec import Codec
from slime.data.sample import Sample
from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn, log_prob

JUDGE = """
from slime.agent.live.exchange import Verdict

def judge(args, exchange):
    said = exchange.next_user_turn
    if said.startswith("raise"):
        raise RuntimeError("no idea")
    if said.startswith("no,"):
        return Verdict(-1.0, hint=" (hint)")
    return 1.0 if said.startswith("thanks") else None

def clean(exchange):
    if any("raise in the filter" in text for text in exchange.texts()):
        raise RuntimeError("broken")
    return not any("@" in text for text in exchange.texts())
"""


class Service:
    """A runtime with a live service, and clients of it."""

    def __init__(self, runtime, engine):
        self.runtime, self.engine = runtime, engine
        self.remote = self.run(agent_server(runtime).running()).remote
        self.address = json.loads((self.folder / "live.json").read_text())

    @property
    def folder(self):
        return Path(self.runtime.args.output_dir)

    def run(self, work):
        return self.runtime.run(work, 60)

    async def post(self, said, name="talk", consent="yes", key=None, **headers):
        given = {"Authorization": f"Bearer {key or self.address['key']}"}
        given |= {"X-Session-Id": name} if name else {}
        given |= {"X-Consent": consent} if consent else {}
        body = said if isinstance(said, dict) else {"messages": said}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                self.address["openai_url"] + "/chat/completions",
                json={"model": self.address["model"], **body},
                headers={**given, **headers},
            ) as response,
        ):
            return response.status, await response.json()

    async def talk(self, *said, **options):
        """The messages of a conversation in which the user says these."""
        messages = []
        for text in said:
            messages.append({"role": "user", "content": text})
            status, answer = await self.post(messages, **options)
            assert status == 200, answer
            messages.append(answer["choices"][0]["message"])
        return messages

    async def stats(self):
        return await self.remote.live("stats")

    async def filled(self, index):
        return await generate(self.runtime.plugin_args, Sample(index=index, group_index=index), {})

    def on_disk(self):
        """All that is in the files of the run, and in the records that are packed in them."""
        files = b"".join(file.read_bytes() for file in self.folder.rglob("*") if file.is_file())
        with closing(sqlite3.connect(self.folder / FILE_NAME)) as connection:
            rows = connection.execute("SELECT record FROM exchanges").fetchall()
        return files.decode(errors="replace") + repr([Codec().unpack(row[0]) for row in rows])


@pytest.fixture
def serve(agent_folder, agent_tokenizer, tmp_path):
    """`serve(turn, ..., **flags)`: a service whose model says these things."""
    made = []
    (tmp_path / "judge.py").write_text(JUDGE)

    def make(*turns, **flags):
        engine = ScriptedEngine(Script(agent_tokenizer, [turns]))
        context = engine.serving()
        usual = {
            "async_mode": "full",
            "live_judge_path": f"{tmp_path / 'judge.py'}:judge",
            "live_filter_path": f"{tmp_path / 'judge.py'}:clean",
        }
        runtime = make_agent_runtime(agent_folder, tmp_path / "run", [context.__enter__()], **{**usual, **flags})
        made.append((runtime, context))
        return Service(runtime, engine)

    yield make
    for runtime, context in made:
        runtime.close()
        context.__exit__(None, None, None)


@pytest.fixture
def spoken(agent_tokenizer):
    return [Turn.of(agent_tokenizer, f"answer {number}", seed=number) for number in range(6)]


def test_what_is_trained_on_is_what_was_sampled_with_the_reward_of_the_next_turn(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("first?", "thanks, second?", "and third?", "thanks"))

    first, third = (service.run(service.filled(index)) for index in (0, 1))
    for sample, turn, request in ((first, spoken[0], 0), (third, spoken[2], 2)):
        prompt = service.engine.requests[request].input_ids.tolist()
        assert list(sample.tokens) == [*prompt, *turn.ids]
        assert sample.response_length == len(turn.ids)
        assert sample.rollout_log_probs == pytest.approx([log_prob(token) for token in turn.ids])
        assert (sample.reward, sample.status) == (1.0, Sample.Status.COMPLETED)
        assert sample.metadata["session"]["retokenised_tokens"] == 0
    assert first.prompt == [{"role": "user", "content": "first?"}]
    assert [message["content"] for message in third.prompt] == [
        "first?", "answer 0", "thanks, second?", "answer 1", "and third?",
    ]  # fmt: skip
    assert service.run(service.stats())["waiting"] == 0  # the second answer, of which nobody said anything, is gone


def test_without_consent_clients_are_served_and_leave_nothing(serve, spoken):
    service = serve(*spoken)
    said = service.run(service.talk("zebra?", "thanks, zebra!", "thanks", consent=None))
    assert [message["content"] for message in said[1::2]] == ["answer 0", "answer 1", "answer 2"]
    service.run(service.talk("lion?", "thanks", name="other"))
    assert service.run(service.stats())["kept"] == 1
    service.runtime.close()
    assert "zebra" not in service.on_disk()
    assert "lion" in service.on_disk()


def test_consent_can_be_taken_back(serve, spoken):
    service = serve(*spoken)

    async def withdrawn():
        messages = await service.talk("zebra?", "thanks", name="one")
        assert (await service.stats())["waiting"] == 1
        status, _ = await service.post([*messages, {"role": "user", "content": "stop"}], name="one", consent="no")
        again = await service.post([*messages, {"role": "user", "content": "and?"}], name="one", consent="yes")
        return status, again[0], await service.stats()

    first, second, stats = service.run(withdrawn())
    assert (first, second) == (200, 200)
    assert (stats["withdrawn"], stats["waiting"], stats["kept"]) == (1, 0, 1)


def test_what_the_filter_does_not_pass_is_not_written(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("mail zebra@home.org", "thanks", "thanks", name="private"))
    service.run(service.talk("raise in the filter", "thanks", name="broken"))
    service.run(service.talk("plain?", "thanks", name="clean"))
    stats = service.run(service.stats())
    assert (stats["filtered"], stats["kept"]) == (3, 1)  # the history is in the prompt of the second answer, too
    service.runtime.close()
    assert "zebra" not in service.on_disk()


def test_a_client_that_never_comes_back_is_unlabelled(serve, spoken):
    service = serve(*spoken, live_idle_timeout=0.2)

    async def silence():
        await service.talk("first?", "thanks", name="one")
        while (stats := await service.stats())["open"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return stats

    stats = service.run(silence())
    assert (stats["unlabelled"], stats["kept"], stats["waiting"]) == (1, 1, 1)
    service.run(service.talk("again?", name="one"))  # the same name later is another conversation
    assert service.run(service.stats())["conversations"] == 2


def test_a_client_that_hangs_up_leaves_no_turn_but_its_word_counts(serve, spoken, agent_tokenizer):
    held = Turn.of(agent_tokenizer, "never heard", hold_after=3)
    service = serve(spoken[0], held)

    async def hang_up():
        messages = await service.talk("first?")
        asking = asyncio.ensure_future(service.post([*messages, {"role": "user", "content": "thanks"}]))
        await asyncio.to_thread(service.engine.holding.wait)
        asking.cancel()
        while (stats := await service.stats()).get("kept", 0) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return stats

    stats = service.run(hang_up())
    assert (stats["kept"], stats["waiting"]) == (1, 1)
    assert service.run(service.filled(0)).reward == 1.0


@pytest.mark.parametrize(
    ("options", "status", "about"),
    [
        ({"name": None}, 400, "X-Session-Id"),
        ({"name": "x" * 300}, 400, "X-Session-Id"),
        ({"consent": "perhaps"}, 400, "X-Consent"),
        ({"key": "guess"}, 401, "no session has this key"),
        ({"said": {"messages": 3}}, 400, "messages"),
        ({"said": {"messages": [{"role": "user", "content": "a"}], "model": "gpt-9"}}, 404, "not served"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(serve, spoken, options, status, about):
    service = serve(*spoken)
    said = options.pop("said", [{"role": "user", "content": "first?"}])
    found, answer = service.run(service.post(said, **options))
    assert found == status
    assert about in answer["error"]["message"]
    assert service.run(service.stats())["waiting"] == 0
    assert len(service.run(service.talk("first?", "thanks", name="after"))) == 4  # it goes on serving


def test_a_burst_is_answered_and_the_most_silent_make_room(serve, spoken):
    service = serve(*spoken, live_max_conversations=4)

    async def burst():
        return await asyncio.gather(
            *(service.post([{"role": "user", "content": "first?"}], name=f"client {number}") for number in range(24))
        )

    answers = service.run(burst())
    assert {status for status, _ in answers} <= {200, 500}
    for status, answer in answers:
        assert status == 200 or "ask again" in answer["error"]["message"]
    stats = service.run(service.stats())
    assert stats["open"] <= 4
    assert stats["conversations"] == sum(status == 200 for status, _ in answers) >= 4
    service.run(service.talk("first?", "thanks", name="later"))
    after = service.run(service.stats())
    assert (after["open"], after["evicted"]) == (4, stats.get("evicted", 0) + 1)
    assert after["kept"] == 1


def test_a_judge_that_raises_leaves_out_its_exchange_and_no_other(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("first?", "raise", name="one"))
    service.run(service.talk("second?", "thanks", name="two"))
    sample = service.run(service.filled(0))
    assert sample.prompt[0]["content"] == "second?"


def test_the_teacher_is_the_model_that_has_read_the_hint(serve, spoken, agent_tokenizer):
    service = serve(*spoken, use_opd=True, opd_type="sample")
    asked = []

    async def scored(tokens, response_length):
        asked.append((tokens, response_length))
        return [-0.5] * response_length

    async def taught():
        await service.talk("first?", "no, otherwise", "thanks")
        task = asyncio.ensure_future(service.filled(0))
        await asyncio.sleep(0)
        service.runtime.owned("live service", lambda: None)._teacher.log_probs = scored
        return await task, await service.filled(1)

    hinted, plain = service.run(taught())
    assert (hinted.reward, plain.reward) == (-1.0, 1.0)
    assert hinted.teacher_log_probs == [-0.5] * len(spoken[0].ids)
    [(tokens, length)] = asked
    assert tokens[-length:] == list(spoken[0].ids)
    assert "first? (hint)" in agent_tokenizer.decode(tokens[:-length])
    assert plain.teacher_log_probs == pytest.approx(plain.rollout_log_probs)


def test_a_slot_has_the_same_exchange_after_a_crash_and_nobody_else_has_it(serve, spoken):
    service = serve(*spoken)

    async def killed():
        await service.talk("first?", "thanks, second?", "thanks", name="one")
        taken = await service.filled(7)
        running = await agent_server(service.runtime).running()
        os.kill(running.child.child_pid(), signal.SIGKILL)
        await running.died.wait()
        again, other = await service.filled(7), await service.filled(8)
        return taken, again, other

    taken, again, other = service.run(killed())
    assert taken.metadata["live"]["id"] == again.metadata["live"]["id"] != other.metadata["live"]["id"]
    assert list(taken.tokens) == list(again.tokens)
    assert json.loads((service.folder / "live.json").read_text())["key"] == service.address["key"]


def test_another_life_of_the_run_finds_every_exchange(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("first?", "thanks, second?", "thanks", name="one"))
    taken = service.run(service.filled(7))
    service.runtime.close()

    later = serve(*spoken)
    assert later.address["key"] == service.address["key"]
    other, again = later.run(later.filled(8)), later.run(later.filled(7))
    assert again.metadata["live"]["id"] == taken.metadata["live"]["id"] != other.metadata["live"]["id"]
    assert list(again.tokens) == list(taken.tokens)
    assert later.run(later.stats())["waiting"] == 0


def test_an_exchange_goes_when_its_sample_is_recorded(serve, spoken):
    service = serve(*spoken)

    async def recorded():
        await service.talk("first?", "thanks", name="one")
        await service.filled(0)
        for told in service.runtime.when_recorded:
            await told(Sample(index=0, group_index=0))
        return await service.remote.live("taken")

    assert service.run(recorded()) == []


def test_slots_are_filled_in_the_order_of_their_numbers():
    async def ordered():
        order, seen = _InOrder(), []

        async def pass_through(number):
            async with order.of(number):
                seen.append(number)
                await asyncio.sleep(0)

        async with order.of(0):
            tasks = [asyncio.create_task(pass_through(number)) for number in (5, 3, 9, 4)]
            await asyncio.sleep(0)
            tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    assert asyncio.run(ordered()) == [3, 4, 5]


def test_a_row_that_cannot_be_read_is_left_out(tmp_path):
    store = ExchangeStore(tmp_path / FILE_NAME)
    asyncio.run(store.put("one", {"id": "a"}))
    asyncio.run(store.put("one", {"id": "b"}))
    with store.transaction() as connection:
        connection.execute("UPDATE exchanges SET record = ? WHERE id = 'a'", (b"\xc1",))
    assert store.take(3) == {"id": "b"}
    assert store.take(4) is None
    assert store.take(3) == {"id": "b"}
    store.close()


def test_a_file_that_is_something_else_is_set_aside(tmp_path):
    (tmp_path / FILE_NAME).write_text("not a database, but long enough to be looked at " * 20)
    store = ExchangeStore(tmp_path / FILE_NAME)
    assert store.waiting() == 0
    store.close()
    assert (tmp_path / "live-1.sqlite").read_text().startswith("not a database")


def test_the_baseline_of_an_answer_is_what_the_others_got():
    samples = [
        Sample(index=i, reward=reward, status=Sample.Status.COMPLETED) for i, reward in enumerate((1.0, -1.0, 1.0))
    ]
    failed = Sample(index=3, status=Sample.Status.FAILED)
    raw, rewards = traffic_baseline(None, [*samples, failed])
    assert raw == [1.0, -1.0, 1.0, 0.0]
    assert rewards == [1.0, -2.0, 1.0, 0.0]
    assert traffic_baseline(None, samples[:1]) == ([1.0], [0.0])


def test_verdicts_are_numbers():
    assert Verdict.of(None, "f") is None
    assert Verdict.of(1, "f") == Verdict(1.0)
    for bad in ("yes", True, float("nan")):
        with pytest.raises((TypeError, ValueError), match="f "):
            Verdict.of(bad, "f")


def test_an_exchange_is_read_back_as_it_was(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("first?", "thanks", name="one"))
    record = service.run(service.remote.live("take", slot=0))
    exchange = Exchange.from_record(record)
    assert (exchange.question, exchange.answer.content, exchange.next_user_turn) == ("first?", "answer 0", "thanks")
    assert exchange.to_record()["followed_by"] == record["followed_by"]
