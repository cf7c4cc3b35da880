"""One sample whole: facts, prompt and response, with what is not trained on marked.

Invariant: with a decoder the text is that of the very tokens, special ones included. Marks are colours where the
terminal has them and brackets elsewhere; text of the model never becomes markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from slime.data.buffer.reader import Decoder, Recorded
from slime.data.json_samples import prompt_text, value_text, visible
from slime.data.sample import Sample

# A response cut into spans of tokens that training treats alike.
#
# Invariant: the spans follow one another without a gap, and their tokens add up to the response.

TRAINED, MASKED, OBSERVED = "trained on", "masked", "observation"
"""Sampled and trained on; sampled and not trained on; not sampled by the model (tool output, templates)."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of a sample, prompt included, and what they are."""

    kind: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def response_spans(sample: Sample) -> list[Span]:
    """The spans of a response; none when its mask does not belong to it."""
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != length or len(sample.tokens) < length:
        return []
    versions = [version for version, count in sample.version_spans for _ in range(count)]
    known = versions if len(versions) == length else [None] * length
    kinds = (
        TRAINED if trained else OBSERVED if version is None else MASKED
        for trained, version in zip(mask, known, strict=True)
    )
    return list(_runs(kinds, start=len(sample.tokens) - length))


def _runs(kinds: Iterator[str], start: int) -> Iterator[Span]:
    for kind, members in groupby(kinds):
        stop = start + sum(1 for _ in members)
        yield Span(kind, start, stop)
        start = stop


_STYLES = {MASKED: "yellow", OBSERVED: "cyan"}
_SPECIAL = "bold magenta"
_MEANING = {MASKED: "sampled, but not trained on", OBSERVED: "not sampled by the model: tool output, templates"}
_MOST_METADATA = 500


def print_conversation(console: Console, record: Recorded, decoder: Decoder | None) -> None:
    """Print a sample; without a decoder its texts, and where in its tokens the spans are."""
    sample = record.sample
    spans = response_spans(sample)
    coloured = console.is_terminal and console.color_system is not None
    console.rule(_title(record), characters="-" if console.legacy_windows else "─")
    for name, value in _facts(record, spans).items():
        if value:
            _say(console, name, Text(visible(value)))
    if decoder is None or not sample.tokens or not (spans or not sample.response_length):
        _say(console, "prompt", Text(visible(prompt_text(sample.prompt))))
        _say(console, "response", Text(visible(sample.response)))
        return
    marked = [kind for kind in (OBSERVED, MASKED) if any(span.kind == kind for span in spans)]
    if marked:
        _say(console, "marks", _legend(marked, coloured))
    prompt = Span(TRAINED, 0, sample.prompt_length)
    _say(console, "prompt", _marked(sample, [prompt], decoder, coloured))
    _say(console, "response", _marked(sample, spans, decoder, coloured))


def _title(record: Recorded) -> str:
    sample = record.sample
    if record.dataset is not None:
        place = f"sample {sample.index} of {record.dataset}: evaluation at step {record.step}"
    else:
        where = "" if record.rollout_id is None else f" rollout {record.rollout_id}"
        place = f"sample {sample.index} of group {sample.group_index}: {record.state}{where}"
    return f"{place}, {sample.status.value}"


def _facts(record: Recorded, spans: Sequence[Span]) -> dict[str, str]:
    sample = record.sample
    metadata = value_text(sample.metadata) if sample.metadata else ""
    counted = ", ".join(f"{len(span)} {span.kind}" for span in spans)
    return {
        "reward": "" if sample.reward is None else str(sample.reward),
        "task": str(sample.task or ""),
        "label": value_text(sample.label),
        "tokens": f"{max(0, sample.prompt_length)} of the prompt, {sample.response_length} of the response",
        "spans": counted if any(span.kind != TRAINED for span in spans) else "",
        "weights": _weights(sample),
        "trained on": "no, it takes no part" if sample.remove_sample else "",
        "failure": sample.failure or "",
        "metadata": metadata if len(metadata) <= _MOST_METADATA else metadata[:_MOST_METADATA] + " …",
    }


def _weights(sample: Sample) -> str:
    """Which versions sampled how many tokens."""
    spans = [(version, count) for version, count in sample.version_spans if version is not None]
    if not spans:
        return ", ".join(f"version {version}" for version in dict.fromkeys(sample.weight_versions))
    return ", ".join(f"version {version} ({count} tokens)" for version, count in spans)


def _legend(kinds: Sequence[str], coloured: bool) -> Text:
    parts: list[Any] = []
    for kind in kinds:
        mark = (kind, _STYLES[kind]) if coloured else f"⟦{kind}: …⟧"
        parts += [", " if parts else "", mark, f" ({_MEANING[kind]})"]
    return Text.assemble(*parts)


def _marked(sample: Sample, spans: Sequence[Span], decoder: Decoder, coloured: bool) -> Text:
    text = Text()
    for span in spans:
        style = _STYLES.get(span.kind)
        if style is not None and not coloured:
            text.append(f"⟦{span.kind}: ")
        for piece, special in decoder.pieces(sample.tokens, span.start, span.stop):
            text.append(visible(piece), style=(_SPECIAL if special else style) if coloured else None)
        if style is not None and not coloured:
            text.append("⟧")
    return text


def _say(console: Console, name: str, value: Text) -> None:
    console.print(Text.assemble((f"{name}: ", "bold"), value), highlight=False, soft_wrap=True)
