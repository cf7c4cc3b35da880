"""Prints one whole sample: its facts, prompt and response, with marks on text that is not trained on.

Invariants: with a decoder, the text is decoded from the sample's tokens, special tokens included. Marks are colours on
a colour terminal and brackets elsewhere; text of the model is never interpreted as markup. The spans of a response are
contiguous and cover all of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from slime.data.buffer.reader import JournaledSample, TokenDecoder
from slime.data.json_samples import format_prompt, format_value, visible
from slime.data.sample import Sample

TRAINED, MASKED, OBSERVED = "trained on", "masked", "observation"
"""Sampled and trained on; sampled and not trained on; not sampled by the model (tool output, templates)."""


@dataclass(frozen=True)
class TokenSpan:
    """The tokens `start` to `stop` of a sample, counted from the start of the prompt, and their kind."""

    kind: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def response_spans(sample: Sample) -> list[TokenSpan]:
    """Split a response into spans of one kind; empty if its loss mask has a different length."""
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
    spans: list[TokenSpan] = []
    start = len(sample.tokens) - length
    for kind, members in groupby(kinds):
        stop = start + sum(1 for _ in members)
        spans.append(TokenSpan(kind, start, stop))
        start = stop
    return spans


_STYLES = {MASKED: "yellow", OBSERVED: "cyan"}
_SPECIAL = "bold magenta"
_MEANING = {MASKED: "sampled, but not trained on", OBSERVED: "not sampled by the model: tool output, templates"}
_MOST_METADATA = 500


def print_sample(console: Console, record: JournaledSample, decoder: TokenDecoder | None) -> None:
    """Print a sample; without a decoder its stored texts, without marks."""
    sample = record.sample
    spans = response_spans(sample)
    coloured = console.is_terminal and console.color_system is not None
    console.rule(_title(record), characters="-" if console.legacy_windows else "─")
    for name, value in _facts(record, spans).items():
        if value:
            _say(console, name, Text(visible(value)))
    if decoder is None or not sample.tokens or not (spans or not sample.response_length):
        _say(console, "prompt", Text(visible(format_prompt(sample.prompt))))
        _say(console, "response", Text(visible(sample.response)))
        return
    marked = [kind for kind in (OBSERVED, MASKED) if any(span.kind == kind for span in spans)]
    if marked:
        legend = Text()
        for kind in marked:
            legend.append(", " if legend else "")
            if coloured:
                legend.append(kind, style=_STYLES[kind])
            else:
                legend.append(f"⟦{kind}: …⟧")
            legend.append(f" ({_MEANING[kind]})")
        _say(console, "marks", legend)
    prompt = TokenSpan(TRAINED, 0, sample.prompt_length)
    _say(console, "prompt", _marked(sample, [prompt], decoder, coloured))
    _say(console, "response", _marked(sample, spans, decoder, coloured))


def _title(record: JournaledSample) -> str:
    sample = record.sample
    if record.dataset is not None:
        place = f"sample {sample.index} of {record.dataset}: evaluation at step {record.step}"
    else:
        where = "" if record.rollout_id is None else f" rollout {record.rollout_id}"
        place = f"sample {sample.index} of group {sample.group_index}: {record.state}{where}"
    return f"{place}, {sample.status.value}"


def _facts(record: JournaledSample, spans: Sequence[TokenSpan]) -> dict[str, str]:
    sample = record.sample
    metadata = format_value(sample.metadata) if sample.metadata else ""
    counted = ", ".join(f"{len(span)} {span.kind}" for span in spans)
    weights = ", ".join(
        f"version {version} ({count} tokens)" for version, count in sample.version_spans if version is not None
    ) or ", ".join(f"version {version}" for version in dict.fromkeys(sample.weight_versions))
    return {
        "reward": "" if sample.reward is None else str(sample.reward),
        "task": str(sample.task or ""),
        "label": format_value(sample.label),
        "tokens": f"{max(0, sample.prompt_length)} of the prompt, {sample.response_length} of the response",
        "spans": counted if any(span.kind != TRAINED for span in spans) else "",
        "weights": weights,
        "trained on": "no, it takes no part" if sample.remove_sample else "",
        "failure": sample.failure or "",
        "metadata": metadata if len(metadata) <= _MOST_METADATA else metadata[:_MOST_METADATA] + " …",
    }


def _marked(sample: Sample, spans: Sequence[TokenSpan], decoder: TokenDecoder, coloured: bool) -> Text:
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
