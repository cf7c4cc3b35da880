"""docs/models.md lists the models that each component computes as transformers does. The nightly run checks all."""

from __future__ import annotations

import pytest

from tests.model_table import PAGE, REFUSED, WINDOWS, Row, page_rows, row, row_names

NOTHING = Row(REFUSED, REFUSED, REFUSED)
BRANCHES = (
    "qwen3" + WINDOWS,  # mapped by Megatron too
    "phimoe" + WINDOWS,  # windows appear only in the attention mask
    "diffllama",  # two attention calls per layer, which only the engine cannot compute
    "llama4_text",  # chunked attention
    "falcon_h1",  # recurrent state in addition to attention
    "bert",  # bidirectional attention
)


@pytest.mark.parametrize("name", BRANCHES)
def test_page_matches_engine_and_fsdp_for_selected_models(name: str) -> None:
    said = page_rows().get(name, NOTHING)
    found = row(name, with_megatron=False)  # `make test-megatron` compares that
    assert (found.engine, found.fsdp) == (said.engine, said.fsdp)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_page_matches_all_models_of_transformers() -> None:
    found = {name: row(name) for name in row_names()}
    assert {name: cells for name, cells in found.items() if cells != NOTHING} == page_rows()
    text = PAGE.read_text()
    assert all(f"`{name.removesuffix(WINDOWS)}`" in text for name in found)
