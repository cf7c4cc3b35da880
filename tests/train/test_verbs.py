"""Verbs of a trainer rank: declared once, and called with parameters that they have."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from slime.train.trainer import Trainer
from slime.train.verbs import verb, verbs_of
from slime.train.weight_export.ipc import SharedWeights
from slime.train.weight_export.sender import WeightSender

SLIME = Path(__file__).parents[2] / "slime"
VERBS = verbs_of(*(owner.__new__(owner) for owner in (Trainer, WeightSender, SharedWeights)))


def calls() -> Iterator[tuple[str, list[str]]]:
    """Yield the verb and the parameters of each `call("verb", name=...)` in the package."""
    for path in [*(SLIME / "weights").glob("*.py"), *(SLIME / "driver").glob("*.py"), SLIME / "train/trainer_group.py"]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        chosen = {  # the values that `verb = ... if ... else ...` may have
            node.targets[0].id: [node.value.body, node.value.orelse]
            for node in nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.IfExp)
        }
        for node in (node for node in nodes if isinstance(node, ast.Call)):
            for target, name in pairwise([node.func, *node.args]):
                if not isinstance(target, ast.Attribute) or target.attr != "call":
                    continue
                for one in chosen.get(name.id, []) if isinstance(name, ast.Name) else [name]:
                    if isinstance(one, ast.Constant):
                        yield str(one.value), [keyword.arg or "**" for keyword in node.keywords]


CALLS = list(calls())


@pytest.mark.parametrize(("name", "params"), CALLS, ids=[name for name, _ in CALLS])
def test_call_names_a_verb_and_its_parameters(name: str, params: list[str]) -> None:
    if name == "init" or (name == "train" and not params):
        return  # `init` makes the trainer, and each rank gets its own parameters of `train`
    inspect.signature(VERBS[name][0]).bind(**dict.fromkeys(params))


def test_every_verb_is_called() -> None:
    assert {name for name, _ in CALLS} - {"init"} == VERBS.keys()


def test_verbs_have_the_needs_of_their_declaration() -> None:
    class Owner:
        @verb()
        def send(self) -> str:
            return "sent"

        @verb("everything")
        def save(self) -> None: ...

        def helper(self) -> None: ...

    owner = Owner()
    found = verbs_of(owner)
    assert {name: needs for name, (_, needs) in found.items()} == {"send": "weights", "save": "everything"}
    assert found["send"][0]() == "sent"
    assert {name: needs for name, (_, needs) in VERBS.items() if needs != "weights"} == {
        "train": "nothing", "sleep": "nothing", "wake": "nothing", "finish_save": "nothing", "save": "everything",
    }  # fmt: skip
