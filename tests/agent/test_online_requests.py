"""Requests to a live service by clients that hang up, never return, send too much or invalid data, or come in bursts.

Covers the deletion of data of clients without consent as well.
"""

import asyncio

import aiohttp
import pytest

from slime.data.sample import Sample
from tests.agent.conftest import CONTEXT
from tests.agent.scripted_engine import Turn


def said(*texts):
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(texts)]


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
def test_rejects_invalid_requests_with_a_reason(serve, spoken, options, status, about):
    service = serve(*spoken)
    said = options.pop("said", [{"role": "user", "content": "first?"}])
    found, answer = service.run(service.post(said, **options))
    assert found == status
    assert about in answer["error"]["message"]
    assert service.run(service.stats())["waiting"] == 0
    assert len(service.run(service.talk("first?", "thanks", name="after"))) == 4  # the service still answers


def test_burst_stays_within_the_limit_and_idle_clients_are_evicted(serve, spoken):
    service = serve(*spoken, live_max_conversations=4)

    async def burst():
        return await asyncio.gather(
            *(service.post([{"role": "user", "content": "first?"}], name=f"client {number}") for number in range(24))
        )

    answers = service.run(burst())
    assert {status for status, _ in answers} <= {200, 429}
    stats = service.run(service.stats())
    assert stats["open"] <= 4
    assert stats["conversations"] == sum(status == 200 for status, _ in answers) >= 4
    service.run(service.talk("first?", "thanks", name="later"))
    after = service.run(service.stats())
    assert (after["open"], after["evicted"]) == (4, stats.get("evicted", 0) + 1)
    assert after["kept"] == 1


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "second?"}]}, "rate_limit_error"),
        ("/responses", {"input": "second?"}, "rate_limit_error"),
        ("/messages", {"messages": [{"role": "user", "content": "second?"}], "max_tokens": 9}, "rate_limit_error"),
    ],
)
def test_full_service_answers_429_with_retry_after(serve, agent_tokenizer, path, body, kind):
    service = serve(Turn.of(agent_tokenizer, "answer", hold_after=2), live_max_conversations=1)
    headers = {"Authorization": f"Bearer {service.address['key']}", "X-Session-Id": "other", "X-Consent": "yes"}
    where = {"url": service.address["openai_url"] + path, "headers": headers}

    async def full():
        first = asyncio.ensure_future(service.post([{"role": "user", "content": "first?"}], name="one"))
        await asyncio.to_thread(service.engine.holding.wait)
        async with aiohttp.ClientSession() as http:
            asked = {**where, "json": {"model": service.address["model"], **body}}
            async with http.post(**asked) as refused:
                told = refused.status, dict(refused.headers), await refused.json()
            counted = await service.stats()
            service.engine.release()
            await first
            async with http.post(**asked) as later:
                return told, counted, later.status

    (status, found, answer), counted, later = service.run(full())
    assert status == 429, answer
    assert int(found["Retry-After"]) >= 1
    assert found["x-should-retry"] == "true"
    assert answer["error"]["type"] == kind
    assert "being answered" in answer["error"]["message"]
    assert (counted["open"], counted["conversations"], counted["refused"]) == (1, 1, 1)
    assert later == 200  # the first one is idle now and is evicted


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_drops_the_turn_but_its_message_labels_the_answer(serve, spoken, agent_tokenizer, stream):
    held = Turn.of(agent_tokenizer, "never heard of zebras", hold_after=3)
    service = serve(spoken[0], held, live_max_conversations=1)

    async def hang_up():
        messages = await service.talk("first?")
        going_on = [*messages, {"role": "user", "content": "thanks, lions?"}]
        await service.hang_up({"messages": going_on, "stream": stream})
        stats = await service.when(lambda stats: stats.get("kept", 0) == 1)
        while (await service.post(said("first?"), name="other"))[0] == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # until the server notices the disconnect
        return stats, await service.stats()

    during, after = service.run(hang_up())
    assert (during["kept"], during["waiting"]) == (1, 1)
    assert (after["kept"], after["open"], after["evicted"]) == (1, 1, 1)
    sample = service.run(service.filled(0))
    assert (sample.reward, sample.prompt[0]["content"]) == (1.0, "first?")
    assert "zebra" not in service.on_disk()


def test_undelivered_answer_is_not_trained_on(serve, spoken, agent_tokenizer):
    held = Turn.of(agent_tokenizer, "never heard", hold_after=3)
    service = serve(held)

    async def come_back():
        await service.hang_up(said("first?"))
        messages = said("first?")
        status, answer = await service.post(messages)
        assert status == 200
        messages += [answer["choices"][0]["message"], *said("thanks")]
        await service.post(messages)
        return await service.when(lambda stats: stats.get("kept", 0) >= 1)

    stats = service.run(come_back())
    assert (stats["kept"], stats["conversations"]) == (1, 1)
    sample = service.run(service.filled(0))
    assert sample.response_length == len(held.ids)  # the second answer was delivered in full


def test_answer_without_a_reply_is_unlabelled_and_deleted(serve, spoken):
    service = serve(*spoken, live_idle_timeout=0.2)

    async def silence():
        name = await service.talk_at_once("first?", "thanks, zebras?")
        stats = await service.when(lambda stats: not stats["open"])
        return name, stats, await service.remote.call("stats")

    name, stats, sessions = service.run(silence())
    assert (stats["unlabelled"], stats["kept"], stats["waiting"]) == (stats["conversations"], 1, 1)
    assert sessions["open"] == 0
    record = repr(service.run(service.remote.call("live_take", slot=0)))
    assert "answer 0" in record
    assert "answer 1" not in record + service.on_disk()
    service.run(service.talk("again?", name=name))  # a reused name starts another conversation
    assert service.run(service.stats())["conversations"] == stats["conversations"] + 1


def test_idle_timeout_starts_at_the_end_of_an_answer(serve, spoken, agent_tokenizer):
    service = serve(Turn.of(agent_tokenizer, "a long answer", hold_after=3), *spoken, live_idle_timeout=2.0)
    silent = [*said("other?")]

    async def slow(attempt):
        name = f"one {attempt}"
        service.engine.holding.clear()
        service.engine._held_once.clear()
        before = (await service.stats()).get("conversations", 0)
        asking = asyncio.ensure_future(service.post(said("first?"), name=name))
        await asyncio.to_thread(service.engine.holding.wait)
        await service.post(silent, name=f"silent {attempt}")
        await service.when(lambda stats: stats["open"] == 1)  # the idle timeout has passed during the answer
        service.engine.release()
        _, answer = await asking
        await service.post(silent, name=f"done {attempt}", **{"X-Session-Done": "yes"})
        await service.when(lambda stats: stats["open"] < 2)  # the service has checked for idle ones since
        messages = [*said("first?"), answer["choices"][0]["message"], *said("thanks")]
        await service.post(messages, name=name)
        stats = await service.stats()
        return stats.get("kept", 0), stats["conversations"] - before

    for attempt in range(4):  # retry if the next message came after the idle timeout
        kept, conversations = service.run(slow(attempt))
        if kept:
            break
    assert (kept, conversations) == (1, 3)


def test_truncated_answer_is_trained_on_as_truncated(serve, agent_tokenizer):
    endless = Turn.of(agent_tokenizer, "on and on " * 20, finish="length")
    service = serve(endless, rollout_max_response_len=16)

    async def cut():
        status, answer = await service.post(said("first?"))
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        messages = [*said("first?"), answer["choices"][0]["message"], *said("no, shorter")]
        asking = asyncio.ensure_future(service.post(messages))
        stats = await service.when(lambda stats: stats.get("kept", 0) == 1)
        await asking
        return stats

    assert service.run(cut())["waiting"] == 1
    sample = service.run(service.filled(0))
    assert (sample.status, sample.response_length, sample.reward) == (Sample.Status.TRUNCATED, 16, -1.0)
    assert list(sample.tokens)[-16:] == list(endless.ids[:16])


def test_too_long_reply_is_rejected_and_labels_nothing(serve, spoken):
    service = serve(*spoken)

    async def too_long():
        messages = await service.talk("first?")
        refused = await service.post([*messages, *said("thanks, zebra " * CONTEXT)])
        before = await service.stats()
        answered = await service.post([*messages, *said("thanks")])
        return refused, before, answered[0], await service.stats()

    (status, problem), before, answered, after = service.run(too_long())
    assert (status, problem["error"]["code"]) == (400, "context_length_exceeded")
    assert (before.get("kept", 0), before["waiting"], before["open"]) == (0, 0, 1)
    assert (answered, after["kept"], after["conversations"]) == (200, 1, 1)
    assert "zebra" not in service.on_disk()


def test_withdrawn_consent_removes_waiting_samples(serve, spoken):
    service = serve(*spoken, live_idle_timeout=0.2)

    async def come_back():
        name = await service.talk_at_once("first?", "thanks")
        await service.talk_at_once("first?", "thanks")
        await service.when(lambda stats: not stats["open"])
        await service.post(said("first?"), name=name, consent="no")
        return await service.stats()

    stats = service.run(come_back())
    assert (stats["kept"], stats["waiting"]) == (2, 1)
