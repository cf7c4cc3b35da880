"""slime: reinforcement-learning post-training for language models.

    import slime
    result = slime.run(hf_checkpoint="model", prompt_data="prompts.jsonl", reward=my_reward, num_rollout=100, ...)

takes the same names as the command line's flags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slime.result import TrainingResult


def run(*, reward: Callable[..., Any] | None = None, **flags: Any) -> TrainingResult:
    """Train with the flags of the command line as keywords; `reward(args, sample)` may be given as a function."""
    from slime.config.parser import config_of_keywords
    from slime.driver import train

    return train(config_of_keywords(flags), reward=reward)
