"""Live service: sampled tokens and rewards, consent, filters, judges, teacher, crash recovery, exchange store."""

import asyncio
import json
import os
import signal

import pytest

from slime.agent.interaction import FILE_NAME, Exchange, ExchangeStore, Verdict
from slime.agent.online import _SlotLock, traffic_baseline
from slime.agent.remote_session import agent_server
from slime.data.sample import Sample
from tests.agent.scripted_engine import log_prob


def test_samples_have_sampled_tokens_and_the_reward_of_the_next_turn(serve, spoken):
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
    assert service.run(service.stats())["waiting"] == 0  # the second answer has no verdict and is deleted


def test_clients_without_consent_are_served_and_not_recorded(serve, spoken):
    service = serve(*spoken)
    said = service.run(service.talk("zebra?", "thanks, zebra!", "thanks", consent=None))
    assert [message["content"] for message in said[1::2]] == ["answer 0", "answer 1", "answer 2"]
    service.run(service.talk("lion?", "thanks", name="other"))
    assert service.run(service.stats())["kept"] == 1
    service.runtime.close()
    assert "zebra" not in service.on_disk()
    assert "lion" in service.on_disk()


def test_withdrawn_consent_deletes_waiting_exchanges(serve, spoken):
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


def test_filtered_exchanges_are_not_written(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("mail zebra@home.org", "thanks", "thanks", name="private"))
    service.run(service.talk("raise in the filter", "thanks", name="broken"))
    service.run(service.talk("plain?", "thanks", name="clean"))
    stats = service.run(service.stats())
    assert (stats["filtered"], stats["kept"]) == (3, 1)  # the prompt of the second answer contains the history
    service.runtime.close()
    assert "zebra" not in service.on_disk()


def test_judge_that_raises_drops_only_its_exchange(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("first?", "raise", name="one"))
    service.run(service.talk("second?", "thanks", name="two"))
    sample = service.run(service.filled(0))
    assert sample.prompt[0]["content"] == "second?"


def test_teacher_log_probs_come_from_the_prompt_with_the_hint(serve, spoken, agent_tokenizer):
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


def test_slot_keeps_its_own_exchange_after_a_server_crash(serve, spoken):
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


def test_restarted_run_finds_every_exchange(serve, spoken):
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


def test_exchange_is_deleted_when_its_sample_is_recorded(serve, spoken):
    service = serve(*spoken)

    async def recorded():
        await service.talk("first?", "thanks", name="one")
        await service.filled(0)
        for told in service.runtime.when_recorded:
            await told(Sample(index=0, group_index=0))
        return await service.remote.call("live_taken")

    assert service.run(recorded()) == []


def test_slots_are_filled_in_numeric_order():
    async def ordered():
        order, seen = _SlotLock(), []

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


def test_unreadable_row_is_skipped(tmp_path):
    store = ExchangeStore(tmp_path / FILE_NAME)
    asyncio.run(store.put("one", {"id": "a"}))
    asyncio.run(store.put("one", {"id": "b"}))
    with store.transaction() as connection:
        connection.execute("UPDATE exchanges SET record = ? WHERE id = 'a'", (b"\xc1",))
    assert store.take(3) == {"id": "b"}
    assert store.take(4) is None
    assert store.take(3) == {"id": "b"}
    store.close()


def test_file_that_is_not_a_database_is_set_aside(tmp_path):
    (tmp_path / FILE_NAME).write_text("not a database, but long enough to be looked at " * 20)
    store = ExchangeStore(tmp_path / FILE_NAME)
    assert store.waiting() == 0
    store.close()
    assert (tmp_path / "live-1.sqlite").read_text().startswith("not a database")


def test_traffic_baseline_is_the_mean_reward_of_the_other_answers():
    samples = [
        Sample(index=i, reward=reward, status=Sample.Status.COMPLETED) for i, reward in enumerate((1.0, -1.0, 1.0))
    ]
    failed = Sample(index=3, status=Sample.Status.FAILED)
    raw, rewards = traffic_baseline(None, [*samples, failed])
    assert raw == [1.0, -1.0, 1.0, 0.0]
    assert rewards == [1.0, -2.0, 1.0, 0.0]
    assert traffic_baseline(None, samples[:1]) == ([1.0], [0.0])


def test_rejects_verdicts_that_are_not_finite_numbers():
    assert Verdict.of(None, "f") is None
    assert Verdict.of(1, "f") == Verdict(1.0)
    for bad in ("yes", True, float("nan")):
        with pytest.raises((TypeError, ValueError), match="f "):
            Verdict.of(bad, "f")


def test_exchange_survives_a_record_round_trip(serve, spoken):
    service = serve(*spoken)
    service.run(service.talk("first?", "thanks", name="one"))
    record = service.run(service.remote.call("live_take", slot=0))
    exchange = Exchange.from_record(record)
    assert (exchange.question, exchange.answer.content, exchange.next_user_turn) == ("first?", "answer 0", "thanks")
    assert exchange.to_record()["followed_by"] == record["followed_by"]
