"""Rollouts as files: written with `--save-debug-rollout-data`, trained on again with `--load-debug-rollout-data`.

Invariant: reading a dump gives samples equal to those written, number for number, in the same groups and fan-outs, so
training on it gives the identical loss. No file can make the reader run code.

`.jsonl`: a header line, then one sample per line. `.pt`: `{"rollout_id", "samples": [dict]}` as slime writes it, read
with weights_only. Evaluations are written under `eval_<rollout id>`.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.config import Config
from slime.data.json_samples import prompt_text, sample_from_json, sample_to_json, to_json, value_text
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.metrics import rollout_metrics
from slime.rollout.outcomes import Group, Produced, RolloutFnTrainOutput, leaves
from slime.storage.files import is_dump

# A handful of completions for people to look at while a run goes on.
#
# Invariant: few rows with short texts, whatever the samples hold, and the same ones each time they are chosen from the
# same samples.

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


FORMAT = "slime-rollout"
VERSION = 1
FLAG = "--load-debug-rollout-data"
_FACTS = ("hf_checkpoint", "rollout_batch_size", "n_samples_per_prompt", "rollout_temperature", "rollout_seed")


class DumpedRollouts:
    """The dumps of another run in the place of a data source: there is nothing to hand out, save or load."""

    def __init__(self, config: Config) -> None:
        assert config.load_debug_rollout_data is not None
        self._template = config.load_debug_rollout_data
        self._share = config.load_debug_rollout_data_subsample

    def generate_rollout(
        self, args: Config, rollout_id: int, data_source: Any, evaluation: bool = False
    ) -> RolloutFnTrainOutput:
        """A rollout function that reads."""
        started = time.monotonic()
        groups = read_dump(dump_path(self._template, rollout_id))
        if self._share is not None:
            groups = head_and_tail(groups, self._share)
        metrics = rollout_metrics(args, list(leaves(groups)), time.monotonic() - started)
        return RolloutFnTrainOutput(groups, {k: v for k, v in metrics.items() if not k.startswith("perf/")})

    def count(self, start: int) -> int:
        """The rollout after the last of the dumps that are there without a gap, from `start` on."""
        if dump_path(self._template, 0) == dump_path(self._template, 1):
            raise UserError(f"{FLAG} {self._template} is one file for every rollout: give --num-rollout")
        end = start
        while dump_path(self._template, end).is_file():
            end += 1
        return end

    def save(self, rollout_id: int) -> None:
        """There is no position."""

    def load(self, rollout_id: int | None = None) -> None:
        """There is no position."""


def dump_path(template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """The file of one rollout."""
    return Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))


def save_rollout(config: Config, rollout_id: int, groups: Sequence[Any]) -> None:
    """Write a training rollout, where the flag asks for it."""
    if config.save_debug_rollout_data is not None:
        write_dump(dump_path(config.save_debug_rollout_data, rollout_id), rollout_id, leaves(groups), config)


def save_evaluation(config: Config, rollout_id: int, data: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the samples of an evaluation, each with its dataset as `eval_dataset`, where the flag asks for it."""
    if config.save_debug_rollout_data is None:
        return
    samples = [
        Sample.from_dict({**sample.to_dict(), "eval_dataset": name})
        for name, found in evaluated_samples(data).items()
        for sample in found
    ]
    path = dump_path(config.save_debug_rollout_data, rollout_id, evaluation=True)
    write_dump(path, rollout_id, samples, config)


def write_dump(path: Path, rollout_id: int, samples: Iterable[Sample], config: Config) -> None:
    """Write one file, whole or not at all."""
    if path.exists() and not is_dump(path):
        raise UserError(f"--save-debug-rollout-data would overwrite {path}, which no run wrote: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        if path.suffix == ".pt":
            _write_pt(temporary, rollout_id, samples)
        else:
            _write_jsonl(temporary, rollout_id, samples, config)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_dump(path: Path) -> list[Group]:
    """The groups of a dump."""
    if not path.is_file():
        raise UserError(f"{FLAG}: there is no dump {path}")
    samples = _read_pt(path) if path.suffix == ".pt" else _read_jsonl(path)
    if not samples:
        raise UserError(f"{FLAG}: {path} holds no samples")
    return nested(samples)


def nested(samples: Sequence[Sample]) -> list[Group]:
    """Samples in the groups (`group_index`) and fan-outs (`rollout_id`) they were written from, in their order."""
    groups: dict[object, dict[object, list[Sample]]] = {}
    for position, sample in enumerate(samples):
        group = ("alone", position) if sample.group_index is None else sample.group_index
        member = ("alone", position) if sample.rollout_id is None else sample.rollout_id
        groups.setdefault(group, {}).setdefault(member, []).append(sample)
    return [[_member(siblings) for siblings in members.values()] for members in groups.values()]


def head_and_tail(groups: list[Group], share: float) -> list[Group]:
    """This share of the groups, at least one: half of them from the head, half from the tail."""
    count = max(1, round(len(groups) * share))
    tail = count // 2
    return groups[: count - tail] + groups[len(groups) - tail :]


def _member(siblings: list[Sample]) -> Produced:
    return siblings[0] if len(siblings) == 1 else siblings


def _write_jsonl(path: Path, rollout_id: int, samples: Iterable[Sample], config: Config) -> None:
    facts = {name: getattr(config, name) for name in _FACTS}
    header = {"format": FORMAT, "version": VERSION, "rollout_id": rollout_id, "config": facts}
    with path.open("w", encoding="utf-8") as file:
        for record in (header, *(sample_to_json(sample) for sample in samples)):
            file.write(json.dumps(record) + "\n")


def _read_jsonl(path: Path) -> list[Sample]:
    with path.open(encoding="utf-8") as file:
        records = [_record(path, number, line) for number, line in enumerate(file, start=1)]
    header = records[0] if records else {}
    if header.get("format") != FORMAT:
        raise UserError(f"{FLAG}: {path} is no dump of a rollout: its first line does not say so")
    if header.get("version") != VERSION:
        raise UserError(
            f"{FLAG}: {path} has version {header.get('version')} of the format, this slime reads version {VERSION}: "
            "write it again"
        )
    return [_sample(path, record) for record in records[1:]]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{FLAG}: {path}:{number}: not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{FLAG}: {path}:{number}: holds no sample")
    return record


def _write_pt(path: Path, rollout_id: int, samples: Iterable[Sample]) -> None:
    import torch

    records = [
        {key: _plain(value, f"sample {sample.index}, {key}") for key, value in sample.to_dict().items()}
        for sample in samples
    ]
    torch.save({"rollout_id": rollout_id, "samples": records}, path)


def _plain(value: Any, where: str) -> Any:
    """What `weights_only` reads back: arrays as tensors, the rest as JSON values."""
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else to_json(value, where)


def _read_pt(path: Path) -> list[Sample]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{FLAG}: {path} is no dump that can be read safely ({str(error).splitlines()[0]}): only plain values and "
            "tensors are taken"
        ) from error
    records = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{FLAG}: {path} is no dump of a rollout: it has no list of samples")
    return [
        _sample(path, {key: value.numpy() if torch.is_tensor(value) else value for key, value in record.items()})
        for record in records
    ]


def _sample(path: Path, record: dict[str, Any]) -> Sample:
    try:
        return sample_from_json(record)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{FLAG}: {path} holds a sample of another kind ({error})") from error
