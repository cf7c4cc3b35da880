"""The datasets of an evaluation: `--eval-prompt-data` and the file of `--eval-config` as one list.

Precedence for each value of a dataset in the file: its own entry, the file's `defaults`, the `--eval-*` flag, the
rollout's flag. Datasets of `--eval-prompt-data` know only the flags. The file looks like this (a mapping from names to
datasets will do for the list; TOML and JSON likewise):

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, max_response_len: 4096}
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from slime.config.config import Config
from slime.config.dataset_file import READING, SWITCH, Entry, integer, number, read_datasets, refuse_twins
from slime.config.flag import above, at_least, between, minus_one_or_at_least


@dataclass(frozen=True)
class EvalDataset:
    """One dataset, with every value it is evaluated with; a plugin that makes one by hand leaves out what it likes.

    Sampling parameters that are None are the rollout's.
    """

    name: str
    path: str
    _: KW_ONLY
    origin: str = "a plugin"
    """Where it was named, for error messages."""
    input_key: str | None = None
    """None: `input`, else the only usual one that the file has."""
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    prompt_suffix: str | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_len: int | None = None
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = False
    repetition_penalty: float | None = None
    no_stop_trim: bool = True
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What the prompts depend on."""
        template = (self.prompt_suffix, self.apply_chat_template, repr(self.apply_chat_template_kwargs))
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key, *template)

    def inject_metadata(self, sample_metadata: dict[str, Any] | None) -> dict[str, Any]:
        """A prompt's metadata with this dataset's entries over it."""
        own = {} if self.rm_type is None else {"rm_type": self.rm_type}
        return {**(sample_metadata or {}), **own, **self.metadata_overrides}

    def sampling_params(self, base: dict[str, Any]) -> dict[str, Any]:
        """The rollout's sampling parameters with this dataset's values over them."""
        own = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_response_len,
            "min_new_tokens": self.min_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
        }
        always = {
            "skip_special_tokens": self.skip_special_tokens,
            "no_stop_trim": self.no_stop_trim,
        }
        unsaid = {"stop": None, "stop_token_ids": None}
        return {**unsaid, **base, **always, **{name: value for name, value in own.items() if value is not None}}


_ENTRIES: dict[str, Entry] = {
    **READING,
    "n_samples_per_eval_prompt": integer(at_least(1)),
    "temperature": number(at_least(0)),
    "top_p": number(between(0, 1, low_open=True)),
    "top_k": integer(minus_one_or_at_least(1)),
    "skip_special_tokens": SWITCH,
    "repetition_penalty": number(above(0)),
    "no_stop_trim": SWITCH,
}


def evaluates(config: Config) -> bool:
    """Whether there is anything to evaluate on."""
    return bool(config.eval_prompt_data) or config.eval_config is not None


def eval_datasets(config: Config) -> list[EvalDataset]:
    """All datasets of a config with derived values; a `UserError` for what is wrong with the file."""
    flags = _flag_values(config)
    datasets = [
        EvalDataset(name=name, path=path, origin=f"--eval-prompt-data {name}", **flags)
        for name, path in config.eval_prompt_data
    ]
    if config.eval_config is not None:
        datasets += _from_file(config.eval_config, flags)
    flag = "--eval-prompt-data" if config.eval_config is None else f"--eval-config {config.eval_config}"
    refuse_twins([dataset.name for dataset in datasets], flag)
    return datasets


def _flag_values(config: Config) -> dict[str, Any]:
    return {
        "input_key": config.eval_input_key or config.input_key,
        "label_key": config.eval_label_key or config.label_key,
        "metadata_key": config.metadata_key,
        "tool_key": config.eval_tool_key or config.tool_key,
        "prompt_suffix": config.prompt_suffix,
        "apply_chat_template": config.apply_chat_template,
        "apply_chat_template_kwargs": config.apply_chat_template_kwargs,
        "max_prompt_len": config.eval_max_prompt_len,
        "n_samples_per_eval_prompt": config.n_samples_per_eval_prompt,
        "temperature": config.eval_temperature,
        "top_p": config.eval_top_p,
        "top_k": config.eval_top_k,
        "max_response_len": config.eval_max_response_len,
        "min_new_tokens": config.eval_min_new_tokens,
        "stop": config.rollout_stop,
        "stop_token_ids": config.rollout_stop_token_ids,
        "skip_special_tokens": bool(config.rollout_skip_special_tokens),
    }


def _from_file(path: str, flags: dict[str, Any]) -> list[EvalDataset]:
    found = read_datasets(path, flag="--eval-config", section="eval", known=_ENTRIES)
    return [EvalDataset(name=one.name, path=one.path, origin=one.origin, **{**flags, **one.values}) for one in found]
