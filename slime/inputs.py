"""What a run reads before anything is started: where its prompts come from, what it is evaluated on, how long it is."""

from __future__ import annotations

from typing import Any

from slime.config import Config
from slime.config.eval_datasets import evaluates
from slime.config.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.config.plugin_args import plugin_args
from slime.data.tokenizer import load_tokenizer
from slime.data.user_source import make_data_source
from slime.plan import needs_engines
from slime.rollout.dump import DumpedRollouts
from slime.rollout.evaluate import read_eval_datasets


def rollouts_of_run(config: Config, data_source: Any) -> int:
    if config.num_rollout is not None:
        return config.num_rollout
    if isinstance(data_source, DumpedRollouts):
        return data_source.count(config.start_rollout_id or 0)
    return (config.num_epoch or 1) * int(data_source.num_rollout_per_epoch)


def open_data_source(config: Config) -> Any:
    if config.load_debug_rollout_data is not None:
        return DumpedRollouts(config)
    return make_data_source(config, plugin_args(config))


def eval_prompts(config: Config) -> dict[str, Any]:
    """What the default evaluation will ask for, read now: a broken file must not end a run at its first evaluation."""
    default = config.eval_function_path == DEFAULT_ROLLOUT_FUNCTION
    if not evaluates(config) or not needs_engines(config) or not default:
        return {}
    return read_eval_datasets(config, load_tokenizer(config.hf_checkpoint, trust_remote_code=config.trust_remote_code))
