"""Saved state of data sources, with buffered groups: `<folder>/rollout/data_state_<rollout id>.json`.

Invariants: a state file is either absent or complete; it is written to a temporary name, flushed, and renamed. Samples
in a journal are not written a second time: the state stores the row id, the progress of the sample, and its prompt; a
sample without a journal row is written whole. On load, such a sample is read from its row if the row still has the same
progress; otherwise its prompt starts over.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from slime.data.json_samples import from_json, sample_from_json, sample_to_json, to_json
from slime.data.sample import COLUMNS, Sample
from slime.errors import UserError
from slime.storage.files import write_durably
from slime.storage.json_types import JsonObject

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^data_state_(\d+)\.json$")


def state_path(folder: str | Path, rollout_id: int) -> Path:
    """Return the path of the state file of one rollout."""
    return Path(folder) / "rollout" / f"data_state_{rollout_id}.json"


def find_state(folder: str | Path, rollout_id: int | None) -> Path | None:
    """Return the state file of a rollout, or of the last one that was saved; None if there is none."""
    if rollout_id is None:
        rollout_id = max(saved_rollouts(folder), default=-1)
    path = state_path(folder, rollout_id)
    return path if path.is_file() else None


def saved_rollouts(folder: str | Path) -> set[int]:
    """Return the ids of the rollouts that have a state file."""
    names = (path.name for path in (Path(folder) / "rollout").glob("*"))
    return {int(match[1]) for name in names if (match := _NAME.match(name))}


def write_state(path: Path, state: JsonObject) -> None:
    """Write a state file atomically and durably."""
    write_durably(path, json.dumps(state).encode())


def read_state(path: Path) -> JsonObject:
    """Read a state file; a `UserError` if it is damaged."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the saved data position is unreadable ({error}); resume from another one") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a saved data position; resume from another one")
    return state


_Group = list[Sample] | list[Sample | list[Sample]]  # as in `slime.data.source`

_RECORDED, _PROMPT = "recorded", "prompt"
_REFERENCE = {_RECORDED, _PROMPT}
_OF_THE_RESPONSE = frozenset(
    {
        *COLUMNS,
        "response",
        "response_length",
        "reward",
        "weight_versions",
        "version_spans",
        "rollout_routed_experts",
        "multimodal_train_inputs",
        "multimodal_train_input_id",
        "remove_sample",
        "status",
        "failure",
        "non_generation_time",
        "spec_info",
        "prefix_cache_info",
        "journal_id",
    }
)
_BLANK = vars(Sample())


class SampleRecords(Protocol):
    """Interface to the journal that holds the buffered samples."""

    @property
    def wanted(self) -> bool:
        """False if buffered groups are not read from the state, because the journal restores them."""

    def name(self) -> str:
        """Return the unique name of the journal."""

    def find(self, name: str, row_ids: list[int]) -> dict[int, Sample]:
        """Return samples of the journal with this name by row id, without deleted rows."""


def buffer_state(groups: Sequence[_Group], records: SampleRecords | None) -> JsonObject:
    """Convert groups to JSON values for the state of a data source."""
    if records is None or not groups:
        return {"buffer": [[_whole(member) for member in group] for group in groups]}
    return {
        "buffer": [[_referred(member) for member in group] for group in groups],
        "buffer_journal": records.name(),
    }


def buffer_from_state(state: JsonObject, records: SampleRecords | None, origin: str) -> list[_Group]:
    """Restore the groups of a saved state; logs how many prompts with a response start over."""
    if records is not None and not records.wanted:
        return []
    groups = state.get("buffer", [])
    try:
        found: dict[int, Sample] = {}
        if "buffer_journal" in state and records is not None:
            entries = (entry for group in groups for member in group for entry in _entries(member))
            row_ids = [int(entry[_RECORDED]["id"]) for entry in entries if entry.keys() == _REFERENCE]
            found = records.find(str(state["buffer_journal"]), row_ids)
        restored = [[_member(member, found) for member in group] for group in groups]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: its buffered groups are unreadable ({error!r}); resume from another one") from error
    lost = sum(any(is_lost for _, is_lost in group) for group in restored)
    if lost:
        logger.warning(
            "%s: %d buffered prompts start over, because the journal with their responses is missing or has changed",
            origin,
            lost,
        )
    return [[member for member, _ in group] for group in restored]


def _entries(member: JsonObject | list[JsonObject]) -> list[JsonObject]:
    return member if isinstance(member, list) else [member]


def _whole(member: Sample | list[Sample]) -> JsonObject | list[JsonObject]:
    return sample_to_json(member) if isinstance(member, Sample) else [sample_to_json(sample) for sample in member]


def _referred(member: Sample | list[Sample]) -> JsonObject | list[JsonObject]:
    """Convert a member to references to journal rows, or to whole samples if one of them has no row.

    A reference includes the non-default fields that the sample had when it was handed out, to start its prompt over.
    """
    samples = [member] if isinstance(member, Sample) else member
    if any(sample.journal_id is None for sample in samples):
        return _whole(member)
    entries: list[JsonObject] = []
    for sample in samples:
        progress = {
            "id": sample.journal_id,
            "response_length": sample.response_length,
            "weights": sample.weight_versions,
        }
        recorded = to_json(progress, f"sample {sample.index}")
        values = {
            name: value
            for name, value in vars(sample).items()
            if name not in _OF_THE_RESPONSE and (name not in _BLANK or value != _BLANK[name])
        }
        if sample.prompt in ("", []):  # the prompt is given as tokens only
            values["tokens"] = sample.token_array()[: max(0, sample.prompt_length)].tolist()
        prompt = {name: to_json(value, f"sample {sample.index}, {name}") for name, value in values.items()}
        entries.append({_RECORDED: recorded, _PROMPT: prompt})
    return entries[0] if isinstance(member, Sample) else entries


def _member(data: JsonObject | list[JsonObject], found: dict[int, Sample]) -> tuple[Sample | list[Sample], bool]:
    """Restore a member; the flag tells that its prompt starts over because a response of it is lost."""
    entries = _entries(data)
    kept: list[Sample] = []
    is_lost = False
    for entry in entries:
        if entry.keys() != _REFERENCE:
            kept.append(sample_from_json(entry))
            continue
        recorded = entry[_RECORDED]
        sample = found.get(int(recorded["id"]))
        then = (recorded["response_length"], from_json(recorded["weights"]))
        if sample is not None and (sample.response_length, sample.weight_versions) == then:
            kept.append(sample)
        else:
            is_lost |= bool(recorded["response_length"])
    if len(kept) < len(entries):  # the one sample that was fanned out starts over
        return sample_from_json(entries[0][_PROMPT]), is_lost
    return (kept if isinstance(data, list) else kept[0]), is_lost
