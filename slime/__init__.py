"""slime: reinforcement-learning post-training for language models.

    import slime
    result = slime.run(hf_checkpoint="model", prompt_data="prompts.jsonl", reward=my_reward, num_rollout=100, ...)

The keywords have the names of the command line's flags; help(slime.run) lists them.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
__all__ = ["__version__", "run"]
__path__.append(str(Path(__file__).parent / "compat"))  # import paths of upstream: slime.utils, slime.backends


def __getattr__(name: str) -> object:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime.driver.keywords import run

    globals()["run"] = run  # imported lazily: the signature is made from the flags, whose import takes a while
    return run
