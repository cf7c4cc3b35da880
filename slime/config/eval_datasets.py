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

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from slime.config.config import Config
from slime.config.files import read_config_file
from slime.config.flag import Check, above, at_least, between, minus_one_or_at_least
from slime.config.groups.reward import known_rm_type
from slime.config.suggest import did_you_mean
from slime.errors import UserError


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
    input_key: str = "input"
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


@dataclass(frozen=True)
class _Entry:
    """What a value in the file must be."""

    kind: str
    fits: Callable[[Any], bool]
    check: Check | None = None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _text(check: Check | None = None) -> _Entry:
    return _Entry("text", _is_text, check)


def _integer(check: Check) -> _Entry:
    return _Entry("an integer", _is_integer, check)


def _number(check: Check) -> _Entry:
    return _Entry("a number", _is_number, check)


_SWITCH = _Entry("true or false", lambda value: isinstance(value, bool))
_MAPPING = _Entry("a mapping", lambda value: isinstance(value, dict))

_ENTRIES: dict[str, _Entry] = {
    "rm_type": _text(known_rm_type),
    "custom_rm_path": _text(),
    "custom_generate_function_path": _text(),
    "input_key": _text(),
    "label_key": _text(),
    "metadata_key": _text(),
    "tool_key": _text(),
    "prompt_suffix": _text(),
    "apply_chat_template": _SWITCH,
    "apply_chat_template_kwargs": _MAPPING,
    "max_prompt_len": _integer(at_least(1)),
    "n_samples_per_eval_prompt": _integer(at_least(1)),
    "temperature": _number(at_least(0)),
    "top_p": _number(between(0, 1, low_open=True)),
    "top_k": _integer(minus_one_or_at_least(1)),
    "max_response_len": _integer(at_least(1)),
    "min_new_tokens": _integer(at_least(0)),
    "stop": _Entry("a list of texts", _list_of(_is_text)),
    "stop_token_ids": _Entry("a list of integers", _list_of(_is_integer)),
    "skip_special_tokens": _SWITCH,
    "repetition_penalty": _number(above(0)),
    "no_stop_trim": _SWITCH,
    "metadata_overrides": _MAPPING,
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
    names = [dataset.name for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            flag = "--eval-prompt-data" if config.eval_config is None else f"--eval-config {config.eval_config}"
            raise UserError(f"{flag} has two datasets named {name}: give each its own name")
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
    where = f"--eval-config {path}"
    content = read_config_file(path, what="--eval-config")
    content = _mapping(content.get("eval", content), f"{where}: eval")
    _refuse_unknown(content, ("defaults", "datasets"), where)
    defaults = _checked(_mapping(content.get("defaults") or {}, f"{where}: defaults"), f"{where}: defaults")
    datasets = list(_named(content.get("datasets"), where))
    if not datasets:
        raise UserError(f"{where} has no datasets: list them under eval: datasets, each with a name and a path")
    found = []
    for name, entries in datasets:
        origin = f"{where}, dataset {name}"
        own = _checked({key: value for key, value in entries.items() if key != "path"}, origin)
        file = entries.get("path")
        if not isinstance(file, str):
            raise UserError(f"{origin}: path is missing: name a .jsonl or .parquet file")
        shared = {key: value for key, value in defaults.items() if key != "custom_rm_path" or "rm_type" not in own}
        found.append(EvalDataset(name=name, path=file, origin=origin, **{**flags, **shared, **own}))
    return found


def _named(datasets: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and entries of each dataset, from either form."""
    if isinstance(datasets, dict):
        for name, entries in datasets.items():
            yield str(name), {"path": entries} if _is_text(entries) else _mapping(entries, f"{where}: {name}")
        return
    if not isinstance(datasets, list | None):
        raise UserError(f"{where}: datasets must be a list or a mapping, not {datasets!r:.80}")
    for number, one in enumerate(datasets or [], start=1):
        entries = _mapping(one, f"{where}: dataset {number}")
        name = entries.get("name")
        if not _is_text(name) or not name:
            raise UserError(f"{where}: dataset {number} has no name")
        yield name, {key: value for key, value in entries.items() if key != "name"}


def _checked(entries: dict[str, Any], where: str) -> dict[str, Any]:
    """The entries that have a value, each of the right kind and in range."""
    _refuse_unknown(entries, (*_ENTRIES, "path", "name"), where)
    given = {key: value for key, value in entries.items() if value is not None}
    for key, value in given.items():
        if key not in _ENTRIES:
            raise UserError(f"{where}: {key} belongs to a dataset of its own")
        entry = _ENTRIES[key]
        if not entry.fits(value):
            raise UserError(f"{where}: {key} must be {entry.kind}, not {value!r:.80}")
        complaint = entry.check(value) if entry.check else None
        if complaint:
            raise UserError(f"{where}: {key} {complaint}, not {value}")
    return given


def _refuse_unknown(entries: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in entries:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{did_you_mean(str(key), known)}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping, not {value!r:.80}")
    return value
