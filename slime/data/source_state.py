"""Where a data source keeps its position: `<folder>/rollout/data_state_<rollout id>.json`.

Invariant: a state file is either absent or complete; it is written beside its final name, flushed, and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from slime.data.json_samples import from_json, sample_from_json, sample_to_json, to_json
from slime.data.sample import COLUMNS, Sample
from slime.errors import UserError

_NAME = re.compile(r"^data_state_(\d+)\.json$")


def state_path(folder: str | Path, rollout_id: int) -> Path:
    """The state file of one rollout."""
    return Path(folder) / "rollout" / f"data_state_{rollout_id}.json"


def latest_state_path(folder: str | Path) -> Path | None:
    """The state file with the highest rollout id, or None."""
    found = saved_rollouts(folder)
    return state_path(folder, max(found)) if found else None


def saved_rollouts(folder: str | Path) -> set[int]:
    """The rollouts that have a state file."""
    names = (path.name for path in (Path(folder) / "rollout").glob("*"))
    return {int(match[1]) for name in names if (match := _NAME.match(name))}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write all or nothing, and durably."""
    write_durably(path, json.dumps(state).encode())


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it is found whole or not at all, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_file(path.parent)


def fsync_file(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_state(path: Path) -> dict[str, Any]:
    """The state in `path`; a `UserError` when it is damaged."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the saved data position is unreadable ({error}); resume from another one") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds no saved data position; resume from another one")
    return state


# The buffered groups in a saved data position.
#
# Invariant: what a journal has recorded is not written a second time. Of such a sample the state has the row's id, how
# far it had come, and what it takes to start its prompt over; a sample that is in no journal is written whole. Read
# again, a sample is the one of the row, if that still stands where it stood; otherwise its prompt starts over.

logger = logging.getLogger(__name__)

_RECORDED, _PROMPT = "recorded", "prompt"
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


class Records(Protocol):
    """The journal that has the buffered samples."""

    @property
    def wanted(self) -> bool:
        """Whether buffered groups are to be read at all; not where the journal itself says which there are."""

    def name(self) -> str:
        """Which journal it is: no other one has this name."""

    def find(self, name: str, row_ids: list[int]) -> dict[int, Sample]:
        """The samples of rows of the journal with that name, by row id; those that are gone are left out."""


def buffer_state(groups: list[Any], records: Records | None) -> dict[str, Any]:
    """The groups as JSON values, for the state of a data source."""
    if records is None or not groups:
        return {"buffer": [[_whole(member) for member in group] for group in groups]}
    return {
        "buffer": [[_referred(member) for member in group] for group in groups],
        "buffer_journal": records.name(),
    }


def buffer_from_state(state: dict[str, Any], records: Records | None, origin: str) -> list[Any]:
    """The groups of a saved state; how many prompts have to start over is logged."""
    if records is not None and not records.wanted:
        return []
    groups = state.get("buffer", [])
    try:
        found: dict[int, Sample] = {}
        if "buffer_journal" in state and records is not None:
            row_ids = [int(entry[_RECORDED]["id"]) for entry in _entries(groups) if _is_reference(entry)]
            found = records.find(str(state["buffer_journal"]), row_ids)
        buffer = [[_member(member, found) for member in group] for group in groups]
        lost = sum(
            any(_is_lost(entry, found) for entry in _entries([group])) for group in groups
        )  # what had no response yet has lost nothing
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: its buffered groups are unreadable ({error!r}); resume from another one") from error
    if lost:
        logger.warning(
            "%s: %d buffered prompts start over, because the journal with their responses is not here or has gone on",
            origin,
            lost,
        )
    return buffer


def _entries(groups: list[Any]) -> Iterator[Any]:
    for group in groups:
        for member in group:
            yield from member if isinstance(member, list) else [member]


def _whole(member: Sample | list[Sample]) -> Any:
    return sample_to_json(member) if isinstance(member, Sample) else [sample_to_json(sample) for sample in member]


def _referred(member: Sample | list[Sample]) -> Any:
    samples = [member] if isinstance(member, Sample) else member
    if any(sample.journal_id is None for sample in samples):
        return _whole(member)
    entries = [_reference(sample) for sample in samples]
    return entries[0] if isinstance(member, Sample) else entries


def _reference(sample: Sample) -> dict[str, Any]:
    recorded = {"id": sample.journal_id, "response_length": sample.response_length, "weights": sample.weight_versions}
    return {_RECORDED: to_json(recorded, f"sample {sample.index}"), _PROMPT: _prompt(sample)}


def _prompt(sample: Sample) -> dict[str, Any]:
    """All that a sample was when it was handed out; fields that have their default value are left out."""
    values = {
        name: value
        for name, value in vars(sample).items()
        if name not in _OF_THE_RESPONSE and (name not in _BLANK or value != _BLANK[name])
    }
    if sample.prompt in ("", []):  # the prompt is its tokens
        values["tokens"] = sample.token_array()[: max(0, sample.prompt_length)].tolist()
    return {name: to_json(value, f"sample {sample.index}, {name}") for name, value in values.items()}


def _is_reference(entry: Any) -> bool:
    return entry.keys() == {_RECORDED, _PROMPT}


def _is_lost(entry: Any, found: dict[int, Sample]) -> bool:
    return _is_reference(entry) and bool(entry[_RECORDED]["response_length"]) and _same(entry, found) is None


def _same(entry: Any, found: dict[int, Sample]) -> Sample | None:
    """The sample of the row that an entry refers to, unless it has another response by now."""
    recorded = entry[_RECORDED]
    sample = found.get(int(recorded["id"]))
    then = (recorded["response_length"], from_json(recorded["weights"]))
    return sample if sample is not None and (sample.response_length, sample.weight_versions) == then else None


def _member(data: Any, found: dict[int, Sample]) -> Sample | list[Sample]:
    entries = data if isinstance(data, list) else [data]
    if not all(map(_is_reference, entries)):
        samples = [sample_from_json(entry) for entry in entries]
        return samples if isinstance(data, list) else samples[0]
    kept = [sample for entry in entries if (sample := _same(entry, found)) is not None]
    if len(kept) < len(entries):  # a fan-out is what one sample became: that one starts over
        return sample_from_json(entries[0][_PROMPT])
    return kept if isinstance(data, list) else kept[0]
