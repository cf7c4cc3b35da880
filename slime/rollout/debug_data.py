"""Rollout dumps: written with `--save-debug-rollout-data`, trained on again with `--load-debug-rollout-data`.

Invariant: reading a dump returns samples equal to those written, number for number, in the same groups and fan-outs, so
training on it gives the identical loss. No file can make the reader run code.

`.jsonl`: a header line, then one sample per line. `.pt`: `{"rollout_id", "samples": [dict]}` as slime writes it, read
with weights_only. Evaluations are written under `eval_<rollout id>`.

`completion_rows` selects a few completions with short texts to show during a run. It selects the same rows each time
from the same samples.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from slime.config import Config
from slime.data.json_samples import format_prompt, format_value, sample_from_json, sample_to_json, to_json
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.metrics import DatasetResult, rollout_metrics
from slime.rollout.outcomes import Group, Nested, RolloutFnTrainOutput, leaves
from slime.storage.files import is_dump
from slime.storage.json_types import JsonObject

PER_ROLLOUT, PER_DATASET = 4, 8
_TEXT, _LABEL = 1000, 200


def completion_rows(
    args: Config, samples: Iterable[Sample], count: int, *, evaluation: bool = False
) -> list[JsonObject]:
    """Return prompt, response, label and reward of up to `count` samples with a response, spread over all of them."""
    answered = [sample for sample in samples if sample.response]
    chosen = [answered[i * len(answered) // count] for i in range(count)] if len(answered) > count else answered
    key = (args.eval_reward_key if evaluation else None) or args.reward_key
    rows: list[JsonObject] = []
    for sample in chosen:
        reward: object = sample.reward
        if isinstance(reward, dict):
            reward = reward.get(key, reward)
        if reward is not None and not isinstance(reward, int | float):
            reward = truncate_middle(format_value(reward), _LABEL)
        row = {
            "prompt": truncate_middle(format_prompt(sample.prompt), _TEXT),
            "response": truncate_middle(sample.response, _TEXT),
            "label": truncate_middle(format_value(sample.label), _LABEL),
            "reward": reward,
        }
        rows.append(row)
    return rows


def evaluated_samples(data: Mapping[str, object]) -> dict[str, list[Sample]]:
    """Return the samples of an evaluation by dataset, failed ones last; a custom evaluation may have no samples."""
    return {
        str(name): [*_samples(result.get("samples")), *_samples(result.get("failed"))]
        for name, result in data.items()
        if isinstance(result, Mapping)
    }


def truncate_middle(text: str, most: int) -> str:
    """Shorten a text to its beginning and end, at most `most` characters, and state how many are left out."""
    if len(text) <= most:
        return text
    between = f" … {len(text) - most} more characters … "
    head = most * 2 // 3
    return text[:head] + between + text[len(text) - (most - head) :]


def _samples(found: object) -> Iterator[Sample]:
    if isinstance(found, Sample):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _samples(part)


FORMAT = "slime-rollout"
VERSION = 1
FLAG = "--load-debug-rollout-data"
_FACTS = ("hf_checkpoint", "rollout_batch_size", "n_samples_per_prompt", "rollout_temperature", "rollout_seed")


class DumpedRollouts:
    """Reads the rollouts of another run from dumps, instead of a data source; it has no position to save or load."""

    def __init__(self, config: Config) -> None:
        assert config.load_debug_rollout_data is not None
        self._template = config.load_debug_rollout_data
        self._share = config.load_debug_rollout_data_subsample

    def generate_rollout(
        self, args: Config, rollout_id: int, data_source: object, evaluation: bool = False
    ) -> RolloutFnTrainOutput:
        """Rollout function that reads the dump of a rollout."""
        started = time.monotonic()
        groups = read_dump(dump_path(self._template, rollout_id))
        if self._share is not None:
            groups = head_and_tail(groups, self._share)
        metrics = rollout_metrics(args, list(leaves(groups)), time.monotonic() - started)
        return RolloutFnTrainOutput(groups, {k: v for k, v in metrics.items() if not k.startswith("perf/")})

    def count(self, start: int) -> int:
        """Return the number after the last rollout of the gapless sequence of dumps from `start`."""
        if dump_path(self._template, 0) == dump_path(self._template, 1):
            raise UserError(f"{FLAG} {self._template} is one file for every rollout: give --num-rollout")
        end = start
        while dump_path(self._template, end).is_file():
            end += 1
        return end

    def save(self, rollout_id: int) -> None:
        """Do nothing: dumps have no position."""

    def load(self, rollout_id: int | None = None) -> None:
        """Do nothing: dumps have no position."""


def dump_path(template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """Return the file of one rollout."""
    return Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))


def save_rollout(config: Config, rollout_id: int, groups: Nested) -> None:
    """Write a training rollout to the file that `--save-debug-rollout-data` names."""
    assert config.save_debug_rollout_data is not None, "the caller checks the flag"
    write_dump(dump_path(config.save_debug_rollout_data, rollout_id), rollout_id, leaves(groups), config)


def save_evaluation(config: Config, rollout_id: int, data: Mapping[str, DatasetResult]) -> None:
    """Write the samples of an evaluation, each with its dataset as `eval_dataset`, if the flag is set."""
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
    """Write one dump file atomically."""
    if path.exists() and not is_dump(path):
        raise UserError(f"--save-debug-rollout-data would overwrite {path}, which no run wrote: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        if path.suffix == ".pt":
            import torch

            records: list[JsonObject] = []
            for sample in samples:
                record: JsonObject = {}
                for key, value in sample.to_dict().items():  # `weights_only` reads back tensors and JSON values
                    place = f"sample {sample.index}, {key}"
                    is_array = isinstance(value, np.ndarray)
                    record[key] = torch.from_numpy(value) if is_array else to_json(value, place)
                records.append(record)
            torch.save({"rollout_id": rollout_id, "samples": records}, temporary)
        else:
            facts = {name: getattr(config, name) for name in _FACTS}
            header = {"format": FORMAT, "version": VERSION, "rollout_id": rollout_id, "config": facts}
            with temporary.open("w", encoding="utf-8") as file:
                for line in (header, *(sample_to_json(sample) for sample in samples)):
                    file.write(json.dumps(line) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_dump(path: Path) -> list[Group]:
    """Read the groups of a dump."""
    if not path.is_file():
        raise UserError(f"{FLAG}: there is no dump {path}")
    samples = _read_pt(path) if path.suffix == ".pt" else _read_jsonl(path)
    if not samples:
        raise UserError(f"{FLAG}: {path} holds no samples")
    return regroup_samples(samples)


def regroup_samples(samples: Sequence[Sample]) -> list[Group]:
    """Arrange samples in their groups (`group_index`) and fan-outs (`rollout_id`), in their order."""
    groups: dict[object, dict[object, list[Sample]]] = {}
    for position, sample in enumerate(samples):
        group = ("alone", position) if sample.group_index is None else sample.group_index
        member = ("alone", position) if sample.rollout_id is None else sample.rollout_id
        groups.setdefault(group, {}).setdefault(member, []).append(sample)
    return [
        [siblings[0] if len(siblings) == 1 else siblings for siblings in members.values()]
        for members in groups.values()
    ]


def head_and_tail(groups: list[Group], share: float) -> list[Group]:
    """Return this share of the groups, at least one: half from the head, half from the tail."""
    count = max(1, round(len(groups) * share))
    tail = count // 2
    return groups[: count - tail] + groups[len(groups) - tail :]


def _read_jsonl(path: Path) -> list[Sample]:
    records: list[JsonObject] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{FLAG}: {path}:{number}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise UserError(f"{FLAG}: {path}:{number}: not a JSON object")
            records.append(record)
    header = records[0] if records else {}
    if header.get("format") != FORMAT:
        raise UserError(f"{FLAG}: {path} is not a rollout dump: its first line is not a {FORMAT} header")
    if header.get("version") != VERSION:
        raise UserError(
            f"{FLAG}: {path} has version {header.get('version')} of the format, this slime reads version {VERSION}: "
            "write it again"
        )
    return [_sample(path, record) for record in records[1:]]


def _read_pt(path: Path) -> list[Sample]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{FLAG}: {path} is not a dump that can be read safely ({str(error).splitlines()[0]}): it may hold only "
            "plain values and tensors"
        ) from error
    records = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{FLAG}: {path} is not a rollout dump: it has no list of samples")
    return [
        _sample(path, {key: value.numpy() if torch.is_tensor(value) else value for key, value in record.items()})
        for record in records
    ]


def _sample(path: Path, record: JsonObject) -> Sample:
    try:
        return sample_from_json(record)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{FLAG}: {path} has an invalid sample ({error})") from error
