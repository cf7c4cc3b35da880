"""The scripted engine returns the scripted tokens through the real client, streamed or not."""

import asyncio

import numpy as np
import pytest

from slime.engine.http.client import EngineClient, EngineRejected, Growing
from slime.engine.http.protocol import generate_payload
from tests.agent.scripted_engine import Play, Script, ScriptedEngine, Turn, encoded, log_prob
from tests.tiny_models import make_tokenizer

TEXT = "the quick fox says what is 12+34? the answer is 46."


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def ask(url, payload, *, stream=False):
    async def call():
        client = EngineClient(url)
        try:
            if not stream:
                return await client.generate_result(payload)
            grown = Growing()
            await client.stream_generate(grown, payload)
            return await client.streamed_result(grown, None)
        finally:
            await client.aclose()

    return asyncio.run(call())


def payload(ids, limit=1000, **more):
    params = {"max_new_tokens": limit, "no_stop_trim": True, "skip_special_tokens": False}
    return {**generate_payload(list(ids), params), **more}


def test_random_splits_keep_the_text_and_change_the_tokens(tokenizer):
    text = f"{TEXT}<|im_end|>"
    odd = encoded(tokenizer, text, seed=1)
    assert tokenizer.decode(odd) == text
    assert odd != tokenizer.encode(text, add_special_tokens=False)
    assert odd[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("incremental", [False, True])
def test_each_conversation_is_played_in_order(tokenizer, stream, incremental):
    turns = [Turn.of(tokenizer, f"{TEXT} {n} é中", seed=n) for n in range(3)]
    other = Turn.of(tokenizer, "another one")
    engine = ScriptedEngine(Script(tokenizer, [turns, Play([other], mark="OTHER")]), incremental=incremental)
    with engine.serving() as url:
        ids = tokenizer.encode("user what is the answer", add_special_tokens=False)
        for number, turn in enumerate(turns):
            for _ in range(2):  # the same prompt gets the same turn
                result = ask(url, payload(ids), stream=stream)
                assert tuple(result.token_ids) == turn.ids
                assert result.log_probs == pytest.approx([log_prob(t) for t in turn.ids])
                assert result.text == f"{TEXT} {number} é中<|im_end|>"
                assert (result.finish_type, result.meta_info["weight_version"]) == ("stop", "1")
            ids = [*ids, *turn.ids, *tokenizer.encode("\nuser the", add_special_tokens=False)]
            if number == 0:
                asked_apart = tokenizer.encode("user OTHER", add_special_tokens=False)
                assert tuple(ask(url, payload(asked_apart), stream=stream).token_ids) == other.ids
        assert is_rejected(url, payload(ids))
        assert "turn 3" in engine.complaints[0]
        assert len(engine.requests) == 8


def is_rejected(url, body):
    with pytest.raises(EngineRejected):
        ask(url, body)
    return True


def test_aborted_turn_resumes_where_it_was_cut(tokenizer):
    turn = Turn.of(tokenizer, TEXT, seed=3, hold_after=5)
    engine = ScriptedEngine(Script(tokenizer, [[turn, Turn.of(tokenizer, "bye")]]))
    prompt = tokenizer.encode("go", add_special_tokens=False)

    async def cut_off(url):
        client = EngineClient(url)
        grown = Growing()
        task = asyncio.ensure_future(client.stream_generate(grown, payload(prompt, rid="a")))
        assert await asyncio.to_thread(engine.holding.wait, 120)
        await client.abort("a")
        await task
        result = await client.streamed_result(grown, None)
        await client.aclose()
        return result

    with engine.serving() as url:
        first = asyncio.run(cut_off(url))
        assert first.finish_type == "abort"
        assert first.token_ids == list(turn.ids[:5])
        engine.weight_version = "2"
        rest = ask(url, payload([*prompt, *first.token_ids]))
        assert (*first.token_ids, *rest.token_ids) == turn.ids
        assert rest.meta_info["weight_version"] == "2"
        again = ask(url, payload([*prompt, *turn.ids]))
        assert again.text == "bye<|im_end|>"


def test_token_limit_ends_a_turn_and_the_next_one_follows(tokenizer):
    turns = [Turn.of(tokenizer, TEXT), Turn.of(tokenizer, "bye")]
    with ScriptedEngine(Script(tokenizer, [turns])).serving() as url:
        prompt = tokenizer.encode("go", add_special_tokens=False)
        cut = ask(url, payload(prompt, limit=3))
        assert (cut.finish_type, tuple(cut.token_ids)) == ("length", turns[0].ids[:3])
        more = tokenizer.encode("on", add_special_tokens=False)
        assert ask(url, payload([*prompt, *cut.token_ids, *more])).text == "bye<|im_end|>"


def test_engines_share_a_script_but_not_their_prefix_caches(tokenizer):
    script = Script(tokenizer, [[Turn.of(tokenizer, TEXT), Turn.of(tokenizer, "bye")]])
    with ScriptedEngine(script).serving() as one, ScriptedEngine(script).serving() as two:
        prompt = np.asarray(tokenizer.encode("what is the answer", add_special_tokens=False), np.int32)
        first = ask(one, payload(prompt.tolist()))
        following = [*prompt.tolist(), *first.token_ids, 5, 6]
        assert ask(two, payload(following)).meta_info["cached_tokens"] == 0
        assert ask(one, payload(following)).meta_info["cached_tokens"] == len(following) - 2
