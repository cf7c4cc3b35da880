"""Functions that compute with an unset flag are rejected at the start; functions with a default are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.config.plugins import constructor_values
from slime.config.plugins.view import check_plugins
from slime.errors import UserError

GENERATE = "async def generate(args, sample, sampling_params):\n    {body}\n    return sample\n"


@pytest.fixture
def generate(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        file = tmp_path / f"generate_{abs(hash(body))}.py"
        file.write_text(GENERATE.format(body=body))
        return f"{file}:generate"

    return write


def check(**flags: Any) -> None:
    check_plugins(Config(rollout_batch_size=1, **flags))


@pytest.mark.parametrize(
    "body",
    [
        "for turn in range(args.max_turns): pass",
        "left = args.max_turns - 1",
        "more = sample.index < args.max_turns",
        "more = [turn for turn in range(1, args.max_turns)]",
    ],
)
def test_function_that_computes_with_an_unset_flag_is_rejected(generate: Callable[[str], str], body: str) -> None:
    path = generate(body)
    check(custom_generate_function_path=path, max_turns=3)
    with pytest.raises(UserError) as caught:
        check(custom_generate_function_path=path)
    assert str(caught.value) == (
        f"--custom-generate-function-path {path} computes with args.max_turns, which has no value: give --max-turns, "
        "or use a default in the function (args.max_turns or 1)"
    )


@pytest.mark.parametrize(
    "body",
    [
        "for turn in range(args.max_turns or 4): pass",
        "turns = args.max_turns if args.max_turns is not None else 4",
        "turns = args.max_turns",
        "print(args.max_turns)",
        "text = 'at most %s' % args.max_turns",
        "left = args.max_turns - 1 if args.max_turns else 4",
        "left = args.num_rollout - 1",
        "left = args.global_batch_size - args.something_of_mine",
    ],
)
def test_function_with_safe_uses_of_an_unset_flag_is_accepted(generate: Callable[[str], str], body: str) -> None:
    check(custom_generate_function_path=generate(body))


def test_unset_flag_keeps_the_default_of_the_constructor() -> None:
    class Judge:
        def __init__(self, args: Any, max_turns: int = 4, seed: int = 0, rm_url: str | None = "here") -> None: ...

    config = Config(rollout_batch_size=1, seed=7)
    assert constructor_values(Judge, config, config, "Judge") == {"args": config, "seed": 7}
    given = config.replace(max_turns=9)
    assert constructor_values(Judge, given, given, "Judge") == {"args": given, "seed": 7, "max_turns": 9}
