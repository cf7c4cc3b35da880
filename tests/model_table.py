"""The table of docs/models.md: models that each component computes as transformers does.

    python -m tests.model_table            # prints the table for every causal language model, about ten minutes
    python -m tests.model_table --write    # writes it into docs/models.md

A row is a small model (`small_model`) with the default config of its family. Families with optional sliding windows get
a second row with windows. The embedded engine and the FSDP trainer run their start-up comparison. Megatron has its own
families; it is compared by the logits of a packed row. A cell is "equal" or "refused". Errors other than `UserError`
and differing numbers end the program.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import set_verbosity_error

from slime.engine.embedded.model.self_test import compare_small_model
from slime.errors import UserError
from slime.models.families.family import FAMILIES
from slime.models.small import small_model
from slime.train.backends.fsdp.builder import check_packed
from tests.family_models import FAMILY_MODELS, RENAMED, WINDOWED_MODELS, make_family_folder

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- made by python -m tests.model_table -->\n", "<!-- end of it -->\n"
WINDOWS = ", windows"
WITH_WINDOWS = " (windows)"
EQUAL, REFUSED = "equal", "refused"

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "ministral": {"head_dim": 32, "rope_parameters": _ROPE},
    "nemotron": {"num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "kimi_linear": {"num_experts": 8, "num_experts_per_token": 2},
}
"""Config fields for families whose default config does not build a model."""


@dataclass(frozen=True)
class Row:
    engine: str
    fsdp: str
    megatron: str


NONE = "**None**"
LABELS = {
    "**Engine, FSDP and Megatron**": Row(EQUAL, EQUAL, EQUAL),
    "**Engine and FSDP**": Row(EQUAL, EQUAL, REFUSED),
    "**Engine only**": Row(EQUAL, REFUSED, REFUSED),
    "**FSDP only**": Row(REFUSED, EQUAL, REFUSED),
    NONE: Row(REFUSED, REFUSED, REFUSED),
}
"""The paragraphs of the page: the components that compute these models as transformers does, the others refuse."""


def row_names() -> list[str]:
    """Returns each model_type, and its variant with windows if the default has none."""
    names = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        names.append(model_type)
        if _windowed(model_type):
            names.append(model_type + WINDOWS)
    return names


def _windowed(model_type: str) -> dict[str, Any]:
    """Returns the config fields that enable sliding windows, for a family whose default config has none."""
    try:
        facts = CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {})).to_dict()
    except Exception:  # noqa: BLE001 - no default config of it
        return {}
    if facts.get("use_sliding_window") is False:
        return {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}
    return {"sliding_window": 4096} if facts.get("sliding_window", 0) is None else {}


def config_and_class(name: str) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    model_type = name.removesuffix(WINDOWS)
    own = DEFAULTS.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**{**own, **(_windowed(model_type) if name != model_type else {})})
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    return config if isinstance(config, kind.config_class) else config.get_text_config(), kind


def row(name: str, *, with_megatron: bool = True) -> Row:
    try:
        config, kind = config_and_class(name)
        small = small_model(kind, config)
    except Exception:  # noqa: BLE001 - transformers cannot build it by default
        return Row(REFUSED, REFUSED, REFUSED)
    engine = _cell(lambda: compare_small_model(lambda: small_model(kind, config)))
    return Row(engine, _cell(lambda: check_packed(small)), megatron(name) if with_megatron else REFUSED)


def _cell(compare: Callable[[], None]) -> str:
    try:
        compare()
    except UserError:
        return REFUSED
    return EQUAL


def megatron(name: str) -> str:
    """Compares Megatron by the small models of its families. All cases of a model_type must be equal."""
    model_type = name.removesuffix(WINDOWS)
    cases = {
        case: own
        for case, (of, own) in (WINDOWED_MODELS if name != model_type else FAMILY_MODELS).items()
        if RENAMED.get(case, of) == model_type
    }
    family = next((family for family in FAMILIES if model_type in family.model_types), None)
    if not cases or family is None or family.support.megatron is not None:
        return REFUSED
    return EQUAL if all(_is_equal_in_megatron(case) for case in cases) else REFUSED


def _is_equal_in_megatron(case: str) -> bool:
    from slime.train.backends.megatron.layout import Layout
    from tests.megatron.test_logits import expected, packed_logits
    from tests.train.in_process import one_rank

    one_rank()
    with tempfile.TemporaryDirectory() as place:
        folder = make_family_folder(Path(place), case)
        try:
            found = packed_logits(folder, Layout())
        except UserError:
            return False
        for ours, theirs in zip(found, expected(folder), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    return True


def table(rows: dict[str, Row]) -> str:
    """Returns Markdown: a paragraph for each combination of components that compute the same models."""
    names: dict[Row, list[str]] = {}
    for name, found in rows.items():
        shown = f"`{name.removesuffix(WINDOWS)}`{WITH_WINDOWS if name.endswith(WINDOWS) else ''}"
        names.setdefault(found, []).append(shown)
    parts = [f"{label}: {', '.join(names[found])}." for label, found in LABELS.items() if found in names]
    assert set(names) <= set(LABELS.values()), "a combination of components without a label"
    return "\n\n".join("\n".join(_wrapped(part)) for part in parts) + "\n"


def _wrapped(text: str) -> Iterator[str]:
    import textwrap

    yield from textwrap.wrap(text, 118, break_on_hyphens=False, break_long_words=False)


def page_rows() -> dict[str, Row]:
    """Returns the models of docs/models.md that some component computes."""
    part = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    found = {}
    for paragraph in part.strip().split("\n\n"):
        label, _, names = " ".join(paragraph.split()).partition(": ")
        for name, windows in re.findall(r"`([^`]+)`(" + re.escape(WITH_WINDOWS) + ")?", names):
            if LABELS[label] != LABELS[NONE]:
                found[name + (WINDOWS if windows else "")] = LABELS[label]
    return found


def main() -> None:
    set_verbosity_error()
    rows = {}
    for name in row_names():
        rows[name] = row(name)
        print(name, rows[name], file=sys.stderr, flush=True)
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + rest.split(END)[1])
    else:
        print(table(rows), end="")


if __name__ == "__main__":
    main()
