"""EngineSampler returns one answer with the tokens of the engines, even after interruptions."""

import asyncio

import numpy as np
import pytest

from slime.agent.session.turn import AnswerReader, Detokenizer, EngineSampler
from slime.engine.http.pool import EnginePool
from slime.models.parsers.formats import Formats, make_parser
from slime.rollout.gate import AbortedTooOften, Gate, Ticket
from tests.agent.scripted_engine import Script, ScriptedEngine, Turn, log_prob
from tests.tiny_models import make_tokenizer

PARAMS = {"max_new_tokens": 400, "temperature": 1.0, "sampling_seed": 5}
SAID = "Grüße 🙂, the answer is 42"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def prompt(tokenizer):
    return np.array(tokenizer.encode("what is it?"), dtype=np.int32)


@pytest.fixture
def play(tokenizer):
    """`play(turn, ...)`: (engine, url) of an engine that plays these turns."""
    serving = []

    def make(*turns, **options):
        engine = ScriptedEngine(Script(tokenizer, [turns]), **options)
        context = engine.serving()
        serving.append(context)
        return engine, context.__enter__()

    yield make
    for context in serving:
        context.__exit__(None, None, None)


def run_sampler(url, tokenizer, prompt, *, streams=True, act=None, **options):
    """Return the answer of one call and the pieces of its text; `act(sampler)` runs concurrently."""

    async def run():
        pool = EnginePool([url])
        sampler = EngineSampler(pool, **options)
        heard = []
        text = Detokenizer(tokenizer, [tokenizer.eos_token_id])

        async def on_events(events):
            heard.extend(event.text for event in events)

        reader = AnswerReader(text, make_parser(Formats()), (), on_events)
        on_ids = reader.feed if streams else None
        try:
            asking = asyncio.ensure_future(sampler.sample(prompt, PARAMS, affinity="key", on_ids=on_ids))
            if act is not None:
                await act(sampler)
            answer = await asking
            await reader.feed([] if streams else answer.token_ids, is_end=True)
            assert "".join(heard) == reader.text
            assert reader.sampled == len(answer.token_ids)
            return answer, heard
        finally:
            await pool.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("streams", [True, False])
def test_answer_has_the_sampled_tokens_and_their_text(tokenizer, prompt, play, streams):
    turn = Turn.of(tokenizer, SAID, seed=3)
    engine, url = play(turn, chunk=1)
    answer, heard = run_sampler(url, tokenizer, prompt, streams=streams)
    assert answer.token_ids == list(turn.ids)
    assert answer.id_array[-1] == tokenizer.eos_token_id
    np.testing.assert_array_equal(answer.log_prob_array, np.float32([log_prob(t) for t in turn.ids]))
    assert ("".join(heard), answer.finish_type) == (SAID, "stop")
    assert "output_token_logprobs" not in answer.meta_info
    [asked] = engine.requests
    assert asked.streamed is streams
    assert asked.input_ids.tolist() == prompt.tolist()
    assert (len(heard) > len(SAID) // 2) is streams
    if streams:
        assert asked.params["stream_interval"] == 1


@pytest.mark.parametrize("streams", [True, False])
def test_answer_cut_off_at_the_gate_resumes_with_new_weights(tokenizer, prompt, play, streams):
    turn = Turn.of(tokenizer, SAID, seed=3, hold_after=9)
    engine, url = play(turn, chunk=2)
    gate = Gate(asyncio.Semaphore(1))
    ticket = Ticket(gate, masks=True)

    async def held_for_a_while(sampler):
        await asyncio.to_thread(engine.holding.wait)
        gate.close()
        await asyncio.gather(sampler.leave_engines(), gate.wait_until_idle())
        engine.weight_version = "2"
        assert len(engine.requests) == 1
        gate.open()

    answer, heard = run_sampler(url, tokenizer, prompt, streams=streams, act=held_for_a_while, ticket=ticket)
    assert answer.token_ids == list(turn.ids)
    assert "".join(heard) == SAID
    assert answer.finish_type == "stop"
    assert answer.meta_info["masked_until"] == 9
    assert answer.meta_info["weight_versions"] == [
        {"version": "1", "start": 0, "end": 9},
        {"version": "2", "start": 9, "end": len(turn.ids)},
    ]
    _, second = engine.requests
    assert second.input_ids.tolist() == [*prompt.tolist(), *turn.ids[:9]]
    assert second.params["max_new_tokens"] == 391
    assert second.params["sampling_seed"] != PARAMS["sampling_seed"]


def test_given_up_answer_is_aborted(tokenizer, prompt, play):
    turn = Turn.of(tokenizer, SAID, hold_after=3)
    engine, url = play(turn)

    async def give_up(sampler):
        await asyncio.to_thread(engine.holding.wait)
        await sampler.leave_engines()

    answer, _ = run_sampler(url, tokenizer, prompt, act=give_up, given_up=lambda: True)
    assert answer.finish_type == "abort"
    assert answer.token_ids == list(turn.ids[:3])


def test_answer_that_makes_progress_has_no_abort_limit(tokenizer, prompt, play):
    ids = tuple(tokenizer.encode("abcdefghijklmnopqrstuvwx"))
    pieces = [Turn((one,), finish="abort") for one in ids[:-1]]
    assert len(pieces) > 16
    _, url = play(*pieces, Turn(ids[-1:]))
    answer, _ = run_sampler(url, tokenizer, prompt)
    assert (answer.token_ids, answer.finish_type) == (list(ids), "stop")


def test_repeated_aborts_without_progress_raise(tokenizer, prompt, play):
    _, url = play(*[Turn((), finish="abort")] * 16)
    with pytest.raises(AbortedTooOften, match="16 times"):
        run_sampler(url, tokenizer, prompt)


def test_detokenizer_splits_text_only_between_characters(tokenizer):
    ids = tokenizer.encode(SAID, add_special_tokens=False)
    text = Detokenizer(tokenizer, silent=[tokenizer.eos_token_id])
    pieces = [text.feed([i]) for i in [*ids, tokenizer.eos_token_id]]
    assert "".join(pieces) == SAID
    assert text.end() == ""
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    half = Detokenizer(tokenizer)
    smile = tokenizer.encode("🙂", add_special_tokens=False)
    assert half.feed(smile[:1]) == ""
    assert "\N{REPLACEMENT CHARACTER}" in half.end()
