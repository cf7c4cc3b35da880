"""Timeline of a dump: positions of the bars, and escaping of trace content."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.data.sample import Sample
from slime.data.trace import trace_event, trace_span
from slime.rollout.debug_data import write_dump

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def viewer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("trace_timeline_viewer")


def event(kind: str, name: Any, ts: Any, span: str | None = None, parent: str | None = None, **attrs: Any) -> Any:
    return {"type": kind, "name": name, "ts": ts, "span_id": span, "parent_span_id": parent, "attrs": attrs}


TRACE = {
    "group_id": 3, "sample_id": 7,
    "events": [
        event("span_start", "generate_and_rm", 100.0, "a"),
        event("span_start", "sglang_generate", 101.0, "b", "a", turn=1),
        event("span_end", "sglang_generate", 103.0, "b", tokens=5),
        event("event", "filtered", 104.0, None, "a"),
        event("span_end", "generate_and_rm", 110.0, "a"),
    ],
}  # fmt: skip


def places(page: str) -> dict[str, tuple[float, float]]:
    """Map each bar name to its left edge and width in percent."""
    found = re.findall(r'class="bar[^"]*" style="left:([\d.]+)%;top:\d+px;width:([\d.]+)%[^>]*>([^<]*)<', page)
    return {name: (float(left), float(width)) for left, width, name in found}


def test_bars_are_placed_by_their_times(viewer: Any) -> None:
    lane = viewer.read_lane(TRACE)
    assert [(bar.name, bar.begin, bar.end, bar.depth) for bar in lane.bars] == [
        ("generate_and_rm", 100.0, 110.0, 0),
        ("sglang_generate", 101.0, 103.0, 1),
        ("filtered", 104.0, 104.0, 1),
    ]
    assert lane.bars[1].attrs == {"turn": 1, "tokens": 5}
    page = viewer.timeline_page([TRACE], "0.jsonl")
    assert places(page) == {"generate_and_rm": (0.0, 100.0), "sglang_generate": (10.0, 20.0)}
    assert 'class="mark" style="left:40.0000%;top:16px"' in page
    assert "group 3, sample 7" in page
    assert "1 samples, 10.000 s" in page


def test_trace_content_is_escaped_and_broken_events_are_counted(viewer: Any) -> None:
    trace = {
        "events": [
            event("span_start", "<script>alert(1)</script>", 1.0, "a", None, note='"><img src=x>'),
            event("span_start", 5, 1.0), event("event", "x", "soon"), event("event", "x", float("nan")), "nothing",
            event("span_end", "<script>alert(1)</script>", 2.0, "never begun"),
        ]
    }  # fmt: skip
    page = viewer.timeline_page([trace, {"events": 7}, {}], "<title>")
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "4 events without a name or a time" in page
    assert "(never ended)" in page


def test_viewer_writes_a_page_for_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sample(index=i, group_index=0, tokens=[1, 2], response="a", response_length=1) for i in range(2)]
    for sample in samples:
        with trace_span(sample, "generate_and_rm"):
            trace_event(sample, "asked")
    write_dump(tmp_path / "0.jsonl", 0, samples, Config(hf_checkpoint="m", rollout_batch_size=1))
    write_dump(
        tmp_path / "1.jsonl", 1, [Sample(index=0, group_index=0)], Config(hf_checkpoint="m", rollout_batch_size=1)
    )
    monkeypatch.syspath_prepend(str(TOOLS))

    def view(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["trace_timeline_viewer.py", *words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TOOLS / "trace_timeline_viewer.py"), run_name="__main__")
        assert isinstance(left.value.code, int)
        return left.value.code

    assert view(str(tmp_path / "0.jsonl")) == 0
    page = (tmp_path / "0.jsonl.html").read_text()
    assert page.count('class="lane"') == 2
    assert page.count('class="mark"') == 2
    assert view(str(tmp_path / "1.jsonl"), "--output", str(tmp_path / "x.html")) == 2
    assert "no sample of" in capsys.readouterr().err
    assert view(str(tmp_path / "2.jsonl")) == 2
    assert not (tmp_path / "x.html").exists()
