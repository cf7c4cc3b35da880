"""`--rm-type ifbench`: 1.0 for a response that follows all instructions of its prompt.

The prompt's metadata has `instruction_id_list` and, aligned with it, `kwargs`: the arguments of each instruction.
Instructions of IFEval are checked here. Those of IFBench are checked by its own checker, which is not a package: its
folder must be on the path.

Invariant: a check of IFEval is a pure function of the response and of the instruction's arguments, linear in the
response; an argument that is missing or of the wrong type is a `ValueError`. Words given as arguments are matched
literally, not as patterns. Sentences and words are split by our own rules, where IFEval uses NLTK.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from slime.errors import UserError
from slime.rollout.rewards.worker_pool import RewardError
from slime.storage.json_types import JsonMapping, JsonObject

Arguments = JsonMapping
Check = Callable[[str, Arguments], bool]

_TITLES = {"mr", "mrs", "ms", "dr", "prof", "capt", "cpt", "lt", "mt", "st", "inc", "ltd", "jr", "sr", "co"}
_ABBREVIATIONS = _TITLES | {"vs", "etc", "e.g", "i.e", "u.s", "u.k", "a.m", "p.m", "fig", "approx"}
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_WORD = re.compile(r"\w+")
_CASED_WORD = re.compile(r"\w+(?:['’.-]\w+)*")
_LONGEST_WORD = 80
_PUNCTUATION = ".,?!'\""
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def count_sentences(text: str) -> int:
    """Count sentences, which end in a full stop, exclamation mark or question mark; the last may have none."""
    count, begin, text = 0, 0, text.rstrip()
    for end in _SENTENCE_END.finditer(text):
        before = text[max(begin, end.start() - _LONGEST_WORD) : end.start()].split()
        last = before[-1].strip("(\"'").lower() if before else ""
        is_short = end.group()[0] == "." and (last in _ABBREVIATIONS or (len(last) == 1 and last.isalpha()))
        if before and not (is_short and end.end() < len(text)):
            count, begin = count + 1, end.end()
    return count + bool(text[begin:].strip())


def _text_argument(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"its {name} must be a text, not {value!r}")
    return value


def _text_list_argument(arguments: Arguments, name: str) -> list[str]:
    value = arguments.get(name)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(word, str) for word in value):
        raise ValueError(f"its {name} must be a list of texts, not {value!r}")
    return list(value)


def _number_argument(arguments: Arguments, name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"its {name} must be a whole number, not {value!r}")
    return int(value)


def _compare_count(count: int, arguments: Arguments, number: str, relation: str = "relation") -> bool:
    wanted, how = _number_argument(arguments, number), arguments.get(relation)
    if how == "at least":
        return count >= wanted
    if how == "less than":
        return count < wanted
    raise ValueError(f"its {relation} must be 'at least' or 'less than', not {how!r}")


def _occurrences(response: str, word: str) -> int:
    return response.lower().count(word.lower())


def detected_language(text: str) -> str | None:
    """Detect the code of a text's language; None if it could be any, as for a text of numbers."""
    try:
        import langdetect
    except ImportError as error:
        raise UserError(
            "--rm-type ifbench: instructions about the response language need the package langdetect, which is not "
            "installed: pip install langdetect"
        ) from error
    langdetect.DetectorFactory.seed = 0
    try:
        found: str = langdetect.detect(text)
    except langdetect.LangDetectException:
        return None
    return found


def _count_parts(parts: list[str]) -> int | None:
    """Count the parts that are not blank; None if one other than the first and the last is blank."""
    if not all(part.strip() for part in parts[1:-1]):
        return None
    return sum(1 for part in parts if part.strip())


def _first_word_of_paragraph(response: str, arguments: Arguments) -> bool:
    paragraphs, nth = response.split("\n\n"), _number_argument(arguments, "nth_paragraph")
    count = sum(1 for paragraph in paragraphs if paragraph.strip())
    if not 1 <= nth <= len(paragraphs) or not paragraphs[nth - 1].strip():
        return False
    word = paragraphs[nth - 1].split()[0].lstrip("'\"")
    ends = [position for position, letter in enumerate(word) if letter in _PUNCTUATION]
    first = word[: ends[0]] if ends else word
    return (
        count == _number_argument(arguments, "num_paragraphs")
        and first.lower() == _text_argument(arguments, "first_word").lower()
    )


def _postscript(response: str, arguments: Arguments) -> bool:
    marker = _text_argument(arguments, "postscript_marker").strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker)), response, re.IGNORECASE) is not None


def _bullets(response: str, arguments: Arguments) -> bool:
    lines = [line.lstrip() for line in response.split("\n")]
    stars = sum(1 for line in lines if line.startswith("*") and len(line) > 1 and line[1] != "*")
    return stars + sum(1 for line in lines if line.startswith("-")) == _number_argument(arguments, "num_bullets")


def _highlights(response: str, arguments: Arguments) -> bool:
    single = [found.strip("*").strip() for found in re.findall(r"\*[^\n*]*\*", response)]
    double = [found[2:-2].strip() for found in re.findall(r"\*\*[^\n*]*\*\*", response)]
    return sum(map(bool, [*single, *double])) >= _number_argument(arguments, "num_highlights")


def _is_json(response: str, arguments: Arguments) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", response.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _title(response: str, arguments: Arguments) -> bool:
    for line in response.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end - 2 and line[begin:end].strip("<>").strip():
            return True
    return False


def _two_responses(response: str, arguments: Arguments) -> bool:
    parts = response.split("******")
    both = [part.strip() for part in parts if part.strip()]
    return _count_parts(parts) == 2 and both[0] != both[1]


def _english(response: str, *, upper: bool) -> bool:
    is_case = response.isupper() if upper else response.islower()
    return is_case and detected_language(response) in (None, "en")


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, given: all(
        _occurrences(text, word) for word in _text_list_argument(given, "keywords")
    ),
    "keywords:frequency": lambda text, given: _compare_count(
        _occurrences(text, _text_argument(given, "keyword")), given, "frequency"
    ),
    "keywords:forbidden_words": lambda text, given: (
        not re.search(
            rf"(?<!\w)(?:{'|'.join(map(re.escape, _text_list_argument(given, 'forbidden_words')))})(?!\w)",
            text,
            re.IGNORECASE,
        )
    ),
    "keywords:letter_frequency": lambda text, given: _compare_count(
        _occurrences(text, _text_argument(given, "letter")), given, "let_frequency", "let_relation"
    ),
    "language:response_language": lambda text, given: (
        detected_language(text) in (None, _text_argument(given, "language"))
    ),
    "length_constraints:number_sentences": lambda text, given: _compare_count(
        count_sentences(text), given, "num_sentences"
    ),
    "length_constraints:number_paragraphs": lambda text, given: (
        _count_parts(re.split(r"\s?\*\*\*\s?", text)) == _number_argument(given, "num_paragraphs")
    ),
    "length_constraints:number_words": lambda text, given: _compare_count(len(_WORD.findall(text)), given, "num_words"),
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": lambda text, given: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= _number_argument(given, "num_placeholders")
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text, given: any(answer in text for answer in _ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, given: (
        len(re.findall(rf"{re.escape(_text_argument(given, 'section_spliter').strip())}\s?\d+", text))
        >= _number_argument(given, "num_sections")
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(_text_argument(given, "prompt_to_repeat").strip().lower())
    ),
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(_text_argument(given, "end_phrase").strip().lower())
    ),
    "startend:quotation": lambda text, given: (
        len(text.strip()) > 1 and text.strip().startswith('"') and text.strip().endswith('"')
    ),
    "change_case:capital_word_frequency": lambda text, given: _compare_count(
        sum(1 for word in _CASED_WORD.findall(text) if word.isupper()), given, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, given: _english(text, upper=True),
    "change_case:english_lowercase": lambda text, given: _english(text, upper=False),
    "punctuation:no_comma": lambda text, given: "," not in text,
}
"""Checks of IFEval's instructions by their names in `instruction_id_list`."""


_REGISTRY = "instructions_registry"


def ifbench_reward(response: str | None, label: object, metadata: JsonMapping | None = None) -> float:
    """Score 1.0 if every instruction is followed, else 0.0; `RewardError` if the metadata has no instructions."""
    metadata = metadata or {}
    names = _decode_json(metadata.get("instruction_id_list"))
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise RewardError(f"ifbench: instruction_id_list in the metadata must be a list of names, not {names!r:.80}")
    given = _decode_json(metadata.get("kwargs"))
    given = [given] * len(names) if given is None or isinstance(given, Mapping) else given
    if not isinstance(given, list | tuple) or len(given) != len(names):
        raise RewardError(f"ifbench: kwargs must be a list of {len(names)} objects, one for each instruction")
    instructions = []
    for name, one in zip(names, given, strict=True):
        arguments = _decode_json(one)
        if not isinstance(arguments, Mapping | None):
            raise RewardError(f"ifbench: the kwargs of {name} must be an object, not {arguments!r:.80}")
        # In Parquet every instruction has the arguments of all, most of them null.
        instructions.append((name.strip(), {key: v for key, v in (arguments or {}).items() if v is not None}))
    text = response or ""
    return float(bool(text.strip()) and all(_follows(text, name, arguments) for name, arguments in instructions))


def _decode_json(value: Any) -> Any:
    """Decode a list or an object that is given as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise RewardError(f"ifbench: {value!r:.80} is not JSON ({error})") from error
    return value


def _follows(response: str, name: str, arguments: JsonObject) -> bool:
    """Check one instruction, here or with IFBench's checker."""
    check = CHECKS.get(name)
    try:
        if check is not None:
            return check(response, arguments)
        try:
            registry = importlib.import_module(_REGISTRY).INSTRUCTION_DICT
        except ImportError as error:
            raise UserError(
                f"--rm-type ifbench: the instruction {name} is one of IFBench, whose checker is not installed: git "
                "clone https://github.com/allenai/IFBench, pip install -r IFBench/requirements.txt, add its folder to "
                "PYTHONPATH"
            ) from error
        if name not in registry:
            raise RewardError(f"ifbench: there is no instruction {name}")
        instruction = registry[name](name)
        instruction.build_description(**arguments)
        return bool(instruction.check_following(response))
    except (TypeError, ValueError, KeyError) as error:
        raise RewardError(f"ifbench: the instruction {name} cannot be checked: {error}") from error
