"""Whether the trainer computes what samples begin with in common once, `--share-prompts`."""

from __future__ import annotations

from collections.abc import Iterator

from slime.config.config import Config
from slime.config.layout import uses_megatron


def shares_prompts(config: Config) -> bool:
    """Whether rows say which of their tokens are the same.

    Unless it was asked for, a model that cannot use it, since more than attention mixes tokens there, does not.
    """
    if config.share_prompts is not None:
        return config.share_prompts
    return not uses_megatron(config) and next(_obstacles(config), None) is None


def sharing_contradictions(config: Config) -> Iterator[str]:
    """What contradicts the flag where it was given."""
    return _obstacles(config) if config.share_prompts else iter(())


def _obstacles(config: Config) -> Iterator[str]:
    if config.context_parallel_size > 1:
        yield (
            f"--share-prompts does not go with --context-parallel-size {config.context_parallel_size}: ranks that "
            "share a row take equal parts of all its tokens; drop one"
        )
    if config.use_routing_replay:
        yield (
            "--share-prompts does not go with routing replay: the copies of a prompt may have gone to other experts; "
            "drop one"
        )
