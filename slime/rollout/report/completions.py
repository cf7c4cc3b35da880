"""A handful of completions for people to look at while a run goes on.

Invariant: few rows with short texts, whatever the samples hold, and the same ones each time they are chosen from the
same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slime.config import Config
from slime.data.json_samples import prompt_text, value_text
from slime.data.sample import Sample

PER_ROLLOUT, PER_DATASET = 4, 8
_TEXT, _LABEL = 1000, 200


def completion_rows(
    args: Config, samples: Iterable[Sample], count: int, *, evaluation: bool = False
) -> list[dict[str, Any]]:
    """Prompt, response, label and reward of up to `count` samples that have a response, spread over all of them."""
    answered = [sample for sample in samples if sample.response]
    chosen = [answered[i * len(answered) // count] for i in range(count)] if len(answered) > count else answered
    key = (args.eval_reward_key if evaluation else None) or args.reward_key
    return [
        {
            "prompt": shortened(prompt_text(sample.prompt), _TEXT),
            "response": shortened(sample.response, _TEXT),
            "label": shortened(value_text(sample.label), _LABEL),
            "reward": _reward(sample.reward, key),
        }
        for sample in chosen
    ]


def evaluated_samples(data: Mapping[str, Any]) -> dict[str, list[Sample]]:
    """The samples of an evaluation by dataset, those that failed last; an evaluation of the user may have none."""
    return {
        str(name): [*_samples(result.get("samples")), *_samples(result.get("failed"))]
        for name, result in data.items()
        if isinstance(result, Mapping)
    }


def shortened(text: str, most: int) -> str:
    """At most `most` characters: the beginning and the end, with what is between them counted."""
    if len(text) <= most:
        return text
    between = f" … {len(text) - most} more characters … "
    head = most * 2 // 3
    return text[:head] + between + text[len(text) - (most - head) :]


def _samples(found: Any) -> Iterator[Sample]:
    if isinstance(found, Sample):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _samples(part)


def _reward(reward: Any, key: str | None) -> float | str | None:
    value = reward.get(key, reward) if isinstance(reward, dict) else reward
    return value if value is None or isinstance(value, int | float) else shortened(value_text(value), _LABEL)
