"""Checks of the prompt files of a run, and the rows of the plan about them.

Invariant: the first rows of each file are read here as the run reads them later, and each of them has what its reward
function or its supervised loss needs. A bounded part of each file is read; only a dry run counts the rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from slime.config import Config
from slime.config.datasets import (
    EvalDataset,
    TrainDataset,
    eval_datasets,
    prompt_files,
    prompt_reading_values,
    reads_prompts,
    train_datasets,
)
from slime.config.flags.rollout import (
    DEFAULT_ROLLOUT_FUNCTION,
    FULLY_ASYNC_ROLLOUT_FUNCTION,
    RM_TYPES,
    SFT_ROLLOUT_FUNCTION,
    compares_with_label,
    known_rm_type,
)
from slime.data.chat_template import is_conversation, preview_template
from slime.data.prompt_rows import USUAL_PROMPT_KEY, PrototypeBuilder, takes_any_prompt
from slime.data.readers import LocatedRow, count_rows, read_first_rows
from slime.data.sample import Sample
from slime.errors import UserError

logger = logging.getLogger(__name__)

_LABEL_NAMES = ("label", "answer", "solution", "ground_truth", "target", "completion", "response", "output")
_SHOWN_CHARACTERS = 100
_OUR_ROLLOUTS = (DEFAULT_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION, FULLY_ASYNC_ROLLOUT_FUNCTION)


@dataclass(frozen=True)
class PromptFile:
    """A dataset, how its rows are read, and the source of rewards for the responses to its prompts."""

    dataset: TrainDataset | EvalDataset
    builder: PrototypeBuilder
    by_function: bool
    """A function of the user gives the rewards, or may set rewards and labels: a row's label is not checked."""
    rewardless: bool
    """Responses need no reward."""
    share: str = ""
    """The share of the prompts, as text, when there are several datasets."""

    @property
    def is_key_chosen(self) -> bool:
        """No flag names the column of the prompts, and it is not the usual one."""
        return self.dataset.input_key is None and self.builder.input_key != USUAL_PROMPT_KEY


def check_data(config: Config, *, reward_given: bool) -> None:
    """Raise a `UserError` for the first of the checked rows that the run could not use."""
    for file in _iter_prompt_files(config, reward_given):
        if file.is_key_chosen:
            logger.warning(
                "%s: prompts are read from %r (no --input-key is given)", file.dataset.path, file.builder.input_key
            )
        for located in read_first_rows(file.dataset.path, columns=file.builder.columns):
            _check_row(config, file, located, file.builder.build(located))


def data_rows(config: Config) -> tuple[tuple[str, str], ...]:
    """Return the rows of the plan about the data; the rows of the files are counted."""
    rows: list[tuple[str, str]] = []
    total = 0
    for file in _iter_prompt_files(config, reward_given=True):
        path, count = file.dataset.path, count_rows(file.dataset.path)
        if isinstance(file.dataset, EvalDataset):
            rows.append((f"eval {file.dataset.name}", f"{count} in {path}"))
            continue
        total += count
        column = f" (column {file.builder.input_key})" if file.is_key_chosen else ""
        rows.append(("prompts", f"{count} in {path}{column}, {file.share or _epoch_text(config, count)}"))
        first = file.builder.build(read_first_rows(path, columns=file.builder.columns, most_rows=1)[0])
        rows.append(("first prompt", _shorten_json(_prompt_text(config, first, file.dataset.apply_chat_template))))
        rows.append(("its label", "none" if first.label is None else _shorten_json(first.label)))
    if total and config.prompt_config is not None:
        rows.insert(0, ("all prompts", f"{total}, {_epoch_text(config, total)}"))
    return tuple(rows)


def _epoch_text(config: Config, prompts: int) -> str:
    steps = steps_per_epoch(config, prompts)
    return f"an epoch is {steps} rollout step{'s' * (steps > 1)} of {config.rollout_batch_size}"


def steps_per_epoch(config: Config, prompts: int) -> int:
    """Return the number of rollout steps of an epoch."""
    return max(1, prompts // config.rollout_batch_size)


def training_prompts(config: Config) -> int | None:
    """Count the prompts; None when they do not come from a file."""
    files = prompt_files(config)
    return sum(map(count_rows, files)) if files and reads_prompts(config) else None


def _iter_prompt_files(config: Config, reward_given: bool) -> Iterator[PromptFile]:
    if reads_prompts(config):
        if config.prompt_data is not None:
            yield _prompt_file(
                config, TrainDataset("", config.prompt_data, **prompt_reading_values(config)), reward_given
            )
        mixed = train_datasets(config)
        for one in mixed:
            share = f"{one.weight / sum(other.weight for other in mixed):.0%} of all as {one.name}"
            yield _prompt_file(config, one, reward_given, share)
    if not config.debug_train_only and config.eval_function_path == DEFAULT_ROLLOUT_FUNCTION:
        for dataset in eval_datasets(config):
            yield _prompt_file(config, dataset, reward_given)


def _prompt_file(
    config: Config, dataset: TrainDataset | EvalDataset, reward_given: bool, share: str = ""
) -> PromptFile:
    trains = isinstance(dataset, TrainDataset)
    builder = PrototypeBuilder(
        None,
        dataset.input_key,
        dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        multimodal_keys=config.multimodal_keys or {},
        prompt_suffix=dataset.prompt_suffix,
        any_prompt=bool(
            dataset.custom_generate_function_path
            or (takes_any_prompt(config) if trains else config.custom_generate_function_path)
        ),
    )
    names_reward = dataset.rm_type is not None or dataset.custom_rm_path is not None
    by_function = (
        dataset.custom_rm_path is not None
        or ((reward_given or config.custom_rm_path is not None) and not names_reward)
        or bool(config.custom_generate_function_path or config.rollout_sample_hook_path)
        or dataset.custom_generate_function_path is not None
        or (trains and config.rollout_function_path not in _OUR_ROLLOUTS)
    )
    taught_alone = config.use_opd and config.rm_type is None and not names_reward
    return PromptFile(
        dataset,
        builder.with_prompt_key(read_first_rows(dataset.path, columns=builder.columns, most_rows=1)[0]),
        by_function,
        rewardless=taught_alone or (trains and config.num_rollout == 0),
        share=share,
    )


def _check_row(config: Config, file: PromptFile, located: LocatedRow, sample: Sample) -> None:
    """Raise a `UserError` unless the row has what its reward function or its supervised loss needs.

    Supervised training needs a label, or an assistant's turn in the conversation.
    """
    dataset = file.dataset
    trains = isinstance(dataset, TrainDataset)
    if trains and config.rollout_function_path == SFT_ROLLOUT_FUNCTION:
        turns = sample.prompt if isinstance(sample.prompt, list) and not dataset.apply_chat_template else []
        if any(turn["role"] == "assistant" for turn in turns) or sample.label not in (None, ""):
            return
        raise UserError(
            f"{located.where}: there is no answer to train on: name its column with --label-key, or end the messages "
            f"with an assistant turn, without --apply-chat-template (it has {sorted(located.row)})"
            f"{_likely_label(located, '--label-key')}"
        )
    if file.by_function:
        return
    typed = {} if dataset.rm_type is None else {"rm_type": dataset.rm_type}
    metadata = {**sample.metadata, **typed, **dataset.metadata_overrides}
    rm_type = str(metadata.get("rm_type") or config.rm_type or "").strip()
    if not rm_type:
        if file.rewardless:
            return
        raise UserError(
            f"nothing gives the responses a reward: name a verifier with --rm-type ({', '.join(RM_TYPES)}) or a "
            f"function with --custom-rm-path; {located.where} names no rm_type in its metadata either"
        )
    complaint = known_rm_type(rm_type)
    if complaint is not None:
        raise UserError(f"{located.where}: rm_type {rm_type!r} in its metadata {complaint}")
    if sample.label is not None or not compares_with_label(rm_type, metadata):
        return
    if file.builder.label_key is None and config.use_opd:
        return  # the plan has a note about it
    if file.builder.label_key is not None:
        raise UserError(
            f"{located.where}: {file.builder.label_key!r} is null, but --rm-type {rm_type} compares with it: fill it in"
        )
    label_flag = "--label-key" if trains else "--eval-label-key"
    raise UserError(
        f"--rm-type {rm_type} compares with a label: name its column with {label_flag} "
        f"({located.where} has {sorted(located.row)}){_likely_label(located, label_flag)}"
    )


def _likely_label(located: LocatedRow, flag: str) -> str:
    likely = next((name for name in _LABEL_NAMES if name in located.row), None)
    return "" if likely is None else f": did you mean {flag} {likely}?"


def _prompt_text(config: Config, sample: Sample, templated: bool) -> object:
    messages = sample.prompt
    if isinstance(messages, str):
        if not templated:
            return messages
        messages = [{"role": "user", "content": messages}]
    if not is_conversation(messages):
        return messages
    options = config.apply_chat_template_kwargs
    rendered = preview_template(config.hf_checkpoint, messages, tools=sample.metadata.get("tools"), options=options)
    return messages if rendered is None else rendered


def _shorten_json(value: object) -> str:
    """Format a value as JSON on one line; a long one is shortened to its beginning and its end."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[: _SHOWN_CHARACTERS * 2 // 3]} ... {text[-_SHOWN_CHARACTERS // 3 :]}"
