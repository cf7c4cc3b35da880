"""Streamed text and stop strings: the first match counts, and no part of it is streamed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slime.engine.embedded.tokenizer import FinalText, TextStream
from tests.tiny_models import make_tokenizer

TOKENIZER = make_tokenizer()
IM_END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def letters(text: str) -> list[int]:
    """One token for each character."""
    return [token for letter in text for token in ids(letter)]


class WordTokenizer:
    """A tokenizer whose token `i` is the text `words[i]`."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.words[token] for token in tokens)


def streamed(
    tokens: list[int], stops: list[str], *, tokenizer: Any = TOKENIZER, skip: bool = True, keep_stop: bool = False
) -> tuple[list[str], str, str | None]:
    """Return the pieces streamed before the end, the final text and the matched stop string."""
    stream = TextStream(tokenizer, stops, skip_special_tokens=skip, streamed=True)
    pieces: list[str] = []
    matched, pushed = None, list[int]()
    for token in tokens:
        pushed.append(token)
        matched = stream.push(token)
        if matched is not None:
            break
        pieces.append(stream.take())
    final = FinalText(pushed, matched, skip_special_tokens=skip, keep_stop=keep_stop, cut=stream.cut).text(tokenizer)
    assert final.startswith("".join(pieces))
    return pieces, final, matched


@pytest.mark.parametrize(
    ("text", "stops", "final", "matched"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("aXbX", ["X"], "a", "X"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("aab!", ["ab"], "a", "ab"),
        ("none", ["zz"], "none", None),
    ],
)
def test_first_stop_match_ends_the_text(text: str, stops: list[str], final: str, matched: str | None) -> None:
    assert streamed(letters(text), stops)[1:] == (final, matched)


@pytest.mark.parametrize(
    ("word", "stops", "final", "matched"),
    [
        ("a\n\nb\n\nc", ["\n\n"], "a", "\n\n"),  # the stop string twice in one token: the first match
        ("xSTOPyHALT", ["HALT", "STOP"], "x", "STOP"),
        ("xbcd", ["c", "bcd"], "x", "bcd"),
        ("xabc", ["abc", "ab"], "x", "ab"),
    ],
)
def test_first_of_several_matches_in_one_token_counts(word: str, stops: list[str], final: str, matched: str) -> None:
    assert streamed([0], stops, tokenizer=WordTokenizer(word))[1:] == (final, matched)


def test_match_across_tokens_is_cut_at_its_start() -> None:
    assert streamed([0, 1, 2], ["END"], tokenizer=WordTokenizer("aEN", "D", "x"))[1:] == ("a", "END")
    assert streamed([0, 1], ["END"], tokenizer=WordTokenizer("aEN", "Db"), keep_stop=True)[1:] == ("aENDb", "END")


def test_partial_stop_strings_are_not_streamed() -> None:
    pieces, final, matched = streamed(letters("say STAR STOP now"), ["STOP"])
    assert (final, matched) == ("say STAR ", "STOP")
    assert "".join(pieces) == "say STAR "
    seen = ""
    for piece in pieces:
        seen += piece
        assert not any(seen.endswith("STOP"[:count]) for count in range(1, 4))
    assert streamed(letters("the ST"), ["STOP"])[1] == "the ST"  # held back until the end of the text


def test_streams_all_text_except_a_possible_stop_prefix() -> None:
    rng = random.Random(5)
    for _ in range(300):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 4))]
        words = ["".join(rng.choices("ab", k=rng.randint(1, 3))) for _ in range(40)]
        stream = TextStream(WordTokenizer(*words), stops, skip_special_tokens=False, streamed=True)
        text = told = ""
        for token, word in enumerate(words):
            before, text = text, text + word
            found = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
            matched = stream.push(token)
            assert matched == (min(found)[2] if found else None), (stops, text)
            if found:
                assert stream.cut == min(found)[0]
                assert not any(stop in before for stop in stops)
                break
            if rng.random() < 0.7:  # a piece may cover several tokens
                told += stream.take()
                held = [
                    n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)
                ]
                assert told == text[: len(text) - max(held)], (stops, text)


def test_stop_string_matching_is_linear_in_the_text() -> None:
    compared = 0

    class Counted(str):
        def __getitem__(self, key: Any) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(key)

        def startswith(self, *given: Any) -> bool:
            nonlocal compared
            compared += 1
            return super().startswith(*given)

    stops = [Counted(chr(99 + number) * 2 + "ab" * 500) for number in range(32)]
    stops += [Counted("ab" * 500 + chr(99 + number)) for number in range(32)]
    text = "ab" * 700 + "b" + "ab" * 300
    stream = TextStream(WordTokenizer("a", "b"), stops, skip_special_tokens=False, streamed=True)
    for letter in text:
        assert stream.push("ab".index(letter)) is None
        stream.take()
    assert compared <= 2 * len(text) * len(stops)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_match_stop_strings_by_their_text(skip: bool) -> None:
    tokens = [*ids("the answer"), IM_END, *ids(" more")]
    pieces, final, matched = streamed(tokens, ["<|im_end|>"], skip=skip)
    assert (final, matched) == ("the answer", "<|im_end|>")
    assert "".join(pieces) in "the answer"
    beside = streamed([*ids("the"), IM_END, *ids(" fox is quick")], ["fox"], skip=skip)
    assert beside[1:] == ("the " if skip else "the<|im_end|> ", "fox")
    across = streamed([*ids("the"), IM_END, *ids("fox")], ["end|>fox"], skip=skip)
    assert across[1:] == ("the" if skip else "the<|im_", "end|>fox")


def test_streamed_text_equals_decoded_text_for_any_tokens() -> None:
    rng = random.Random(3)
    for _ in range(60):
        tokens = [rng.randrange(320) for _ in range(rng.randrange(1, 120))]
        tokens += letters("héllo wörld 😀") + [rng.choice(tokens)] * rng.randrange(60)
        for skip in (True, False):
            pieces, final, matched = streamed(tokens, ["no such string"], skip=skip)
            assert (final, matched) == (TOKENIZER.decode(tokens, skip_special_tokens=skip), None)
            assert final.startswith("".join(pieces))


@pytest.mark.parametrize("token", [IM_END, TOKENIZER.convert_tokens_to_ids("Ã")])
def test_undecodable_tokens_do_not_accumulate(token: int) -> None:
    """For skipped special tokens or partial characters, the tail decoded again per token stays short."""
    longest = 0

    class Watched:
        def decode(self, tokens: list[int], **how: Any) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return TOKENIZER.decode(tokens, **how)

    stream = TextStream(Watched(), [], skip_special_tokens=True, streamed=True)
    for _ in range(300):
        stream.push(token)
    assert longest < 64
