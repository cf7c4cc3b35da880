"""Instruction-following rewards: every IFEval instruction, the metadata formats, and IFBench instructions."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.config import Config
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.rewards.ifbench import CHECKS, count_sentences, ifbench_reward
from slime.rollout.rewards.worker_pool import RewardError

AT_LEAST, LESS = "at least", "less than"

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Red", "c++"]}, "A red C++ book.", "A red book."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": AT_LEAST}, "Tea, more tea", "Tea."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": LESS}, "Tea.", "tea tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "dog"]}, "Concatenate dogma.", "A Dog."),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": AT_LEAST}, "Qq", "q"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": AT_LEAST}, "One. Two!", "Dr. Who is in"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\nb\n***\nc"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** b ***", "a *** *** b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, "two words", "now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'First.\n\n"then, more',
        "then\n\nfirst",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text\nP. S. more", "Text PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s. more", "P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b\n**bold**", "* a\u2028* b"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1 x Part 2",
        "Part 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A\x0ctitle>>\ntext", "<< >> text <title>"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "say it: yes", "yes, say it"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'It is the end."', "The end. Or not"),
    ("startend:quotation", {}, ' "quoted" ', '"quoted'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        "NASA in the USA",
        "NASA in Usa",
    ),
    ("punctuation:no_comma", {}, "none here", "one, here"),
]
WITH_LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_each_instruction_accepts_a_good_and_rejects_a_bad_response(
    name: str, arguments: dict[str, Any], good: str, bad: str
) -> None:
    metadata = {"instruction_id_list": [name], "kwargs": [arguments]}
    assert ifbench_reward(good, None, metadata) == 1.0
    assert ifbench_reward(bad, None, metadata) == 0.0


def test_all_instructions_have_a_case() -> None:
    assert {name for name, *_ in CASES} | WITH_LANGUAGE == CHECKS.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No end", 1),
        ("One. Two? Three!", 3),
        ("Mr. Smith met Dr. J. Doe. They spoke.", 2),
        ("It costs 3.50 now... Really?! Yes", 3),
        ('He said "no." Then left.', 2),
        ("Apples, pears, etc.", 1),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_reward_requires_all_instructions_and_a_nonempty_response() -> None:
    both = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert ifbench_reward('"yes"', None, both) == 1.0
    assert ifbench_reward("yes", None, both) == 0.0
    assert ifbench_reward("  ", None, {"instruction_id_list": ["punctuation:no_comma"]}) == 0.0


def test_metadata_with_nulls_floats_or_json_text_is_accepted() -> None:
    """Parquet fills absent arguments with null; JSON may be stored as text; numbers may be floats."""
    kwargs = [{"num_bullets": 1.0, "keywords": None, "relation": None}, {"num_bullets": None, "keywords": ["a"]}]
    names = ["detectable_format:number_bullet_lists", "keywords:existence"]
    assert ifbench_reward("* a", None, {"instruction_id_list": names, "kwargs": kwargs}) == 1.0
    text = {"instruction_id_list": '["keywords:existence"]', "kwargs": '[{"keywords": ["b"]}]'}
    assert ifbench_reward("* a", None, text) == 0.0


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (None, "instruction_id_list in the metadata must be a list of names"),
        ({"instruction_id_list": ["a", "b"], "kwargs": [{}]}, "kwargs must be a list of 2 objects"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [3]}, "the kwargs of keywords:existence must be an"),
        ({"instruction_id_list": ["keywords:existence"]}, "cannot be checked: its keywords must be a list of texts"),
        (
            {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 3, "relation": "?"}]},
            "its relation must be 'at least' or 'less than'",
        ),
        ({"instruction_id_list": "[broken"}, "is not JSON"),
    ],
)
def test_invalid_metadata_is_an_error_not_a_zero_reward(metadata: Any, sentence: str) -> None:
    with pytest.raises(RewardError, match="ifbench") as caught:
        ifbench_reward("text", None, metadata)
    assert sentence in str(caught.value)


def test_language_checks_need_langdetect(monkeypatch: pytest.MonkeyPatch) -> None:
    french = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "fr"}]}
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(UserError, match="pip install langdetect"):
        ifbench_reward("bonjour", None, french)
    detector = SimpleNamespace(
        DetectorFactory=SimpleNamespace(seed=None),
        LangDetectException=LookupError,
        detect=lambda text: "fr" if "bonjour" in text.lower() else "en",
    )
    monkeypatch.setitem(sys.modules, "langdetect", detector)  # type: ignore[arg-type]
    assert [ifbench_reward(text, None, french) for text in ("bonjour", "hello")] == [1.0, 0.0]
    shouted = {"instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]}
    assert [ifbench_reward(text, None, shouted) for text in ("HELLO", "Hello", "BONJOUR")] == [1.0, 0.0, 0.0]
    quiet = {"instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}
    assert [ifbench_reward(text, None, quiet) for text in ("hello", "Hello")] == [1.0, 0.0]


def test_ifbench_instructions_use_the_ifbench_checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"instruction_id_list": ["count:word_count_range"], "kwargs": [{"min_words": 2, "max_words": 3}]}
    with pytest.raises(UserError, match=r"one of IFBench, .* git clone https://github.com/allenai/IFBench"):
        ifbench_reward("two words", None, metadata)
    (tmp_path / "instructions_registry.py").write_text(
        "class Range:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def build_description(self, *, min_words, max_words): self.range = (min_words, max_words)\n"
        "    def check_following(self, value): return self.range[0] <= len(value.split()) <= self.range[1]\n"
        "INSTRUCTION_DICT = {'count:word_count_range': Range}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "instructions_registry", raising=False)
    assert [ifbench_reward(text, None, metadata) for text in ("two words", "one")] == [1.0, 0.0]
    with pytest.raises(RewardError, match="there is no instruction count:other"):
        ifbench_reward("x", None, {"instruction_id_list": ["count:other"]})
    monkeypatch.delitem(sys.modules, "instructions_registry")


def test_hub_scores_ifbench_without_a_label() -> None:
    hub = RewardHub(Config(rm_type="ifbench"))
    sample = Sample(prompt="p", response="no comma", metadata={"instruction_id_list": ["punctuation:no_comma"]})
    assert asyncio.run(hub.score(sample)) == 1.0
    hub.close()
