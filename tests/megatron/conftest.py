"""Process groups shared by the Megatron tests, and folders of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.family_models import make_family_folder
from tests.megatron.ranks import RankGroup
from tests.train.tiny_training import CONFIGS


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """Process groups by size, started on first use and reused by later tests."""
    groups: dict[int, RankGroup] = {}

    def of(size: int) -> RankGroup:
        if size not in groups or groups[size].broken:
            groups[size] = RankGroup(size)
        return groups[size]

    yield of
    for group in groups.values():
        if not group.broken:
            group.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model of `tests.train.tiny_training` by name; four layers, so that stages can be interleaved."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = _make_folder(kind, tmp_path_factory.mktemp("models") / kind)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a case of `tests.family_models` by name."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = make_family_folder(tmp_path_factory.mktemp("family") / case, case)
        return made[case]

    return folder


def _make_folder(kind: str, path: Path) -> Path:
    facts = CONFIGS[kind]().to_dict() | {"num_hidden_layers": 4, "layer_types": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 * torch.randn_like(parameter)
            parameter.copy_(1 + spread if parameter.dim() == 1 else spread)
    model.save_pretrained(path)
    return path
