"""Write the timeline of a rollout's dump (--save-debug-rollout-data) as a page for the browser.

One lane per sample, a bar per span, a mark per event. Invariant: the page is one file without scripts or external
resources, and all content of traces is escaped text. Events without a name or time are left out and counted; a span
that never ended extends to the end of the page and is labelled.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import common

from slime.errors import UserError
from slime.rollout.debug_data import read_dump
from slime.rollout.outcomes import leaves

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
_ROW = 16
_PAGE = """\
<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 13px sans-serif; margin: 1.5em; }}
.lane {{ display: flex; border-top: 1px solid #ddd; }}
.who {{ width: 11em; flex: none; padding: 1px 0; }}
.time {{ position: relative; flex: auto; }}
.bar, .mark {{ position: absolute; height: 14px; overflow: hidden; white-space: nowrap; font-size: 11px; color: #fff; }}
.bar {{ min-width: 1px; border-radius: 2px; }}
.open {{ opacity: .55; }}
.mark {{ width: 2px; background: #222; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{lanes}
"""


@dataclass
class Bar:
    """A span, or an event of zero length; times are seconds since the epoch."""

    name: str
    begin: float
    end: float | None
    attrs: dict[str, Any]
    depth: int = 0
    is_event: bool = False


@dataclass
class Lane:
    """The spans and events of one sample."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    bad_events: int = 0


def timeline_page(traces: Iterable[Mapping[str, Any]], title: str) -> str:
    """Render the page of these traces; lanes are ordered by their first event."""
    lanes = [read_lane(trace) for trace in traces]
    shown = sorted((lane for lane in lanes if lane.bars), key=lambda lane: lane.bars[0].begin)
    bars = [bar for lane in shown for bar in lane.bars]
    first = min((bar.begin for bar in bars), default=0.0)
    last = max((bar.begin if bar.end is None else bar.end for bar in bars), default=0.0)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(dict.fromkeys(bar.name for bar in bars))}
    bad = sum(lane.bad_events for lane in lanes)
    summary = f"{len(shown)} samples, {last - first:.3f} s" + (
        f"; {bad} events without a name or a time" if bad else ""
    )
    rows = []
    for lane in shown:
        height = _ROW * (1 + max(bar.depth for bar in lane.bars))
        rows.append(
            f'<div class="lane"><div class="who">{escape(lane.name)}</div>'
            f'<div class="time" style="height:{height}px">{"".join(_bars(lane, first, last, colours))}</div></div>'
        )
    return _PAGE.format(title=escape(title), summary=summary, lanes="\n".join(rows))


def read_lane(trace: Mapping[str, Any]) -> Lane:
    """Build the lane of one trace."""
    lane = Lane(f"group {trace.get('group_id')}, sample {trace.get('sample_id')}")
    open_bars: dict[object, Bar] = {}
    events = trace.get("events")
    for event in events if isinstance(events, Sequence) else ():
        if not _is_event(event):
            lane.bad_events += 1
            continue
        attrs = event.get("attrs") if isinstance(event.get("attrs"), Mapping) else {}
        bar = open_bars.get(event.get("span_id")) if event["type"] == "span_end" else None
        if bar is not None:
            bar.end, bar.attrs = float(event["ts"]), {**bar.attrs, **attrs}
            continue
        parent = open_bars.get(event.get("parent_span_id"))
        bar = Bar(event["name"], float(event["ts"]), None, dict(attrs), 0 if parent is None else parent.depth + 1)
        if event["type"] == "span_start":
            open_bars[event.get("span_id")] = bar
        else:
            bar.end, bar.is_event = bar.begin, True
        lane.bars.append(bar)
    lane.bars.sort(key=lambda bar: bar.begin)
    return lane


def _is_event(event: object) -> bool:
    if not isinstance(event, Mapping) or not isinstance(event.get("name"), str):
        return False
    ts = event.get("ts")
    known = event.get("type") in ("span_start", "span_end", "event")
    return known and isinstance(ts, int | float) and not isinstance(ts, bool) and math.isfinite(ts)


def _bars(lane: Lane, first: float, last: float, colours: Mapping[str, str]) -> Iterator[str]:
    scale = 100 / (last - first) if last > first else 0.0
    for bar in lane.bars:
        end = last if bar.end is None else bar.end
        what = f"{bar.name}, {bar.begin - first:.3f} s" + ("" if bar.is_event else f" for {end - bar.begin:.3f} s")
        what += " (never ended)" if bar.end is None else ""
        attrs = json.dumps(bar.attrs, ensure_ascii=False, default=str) if bar.attrs else ""
        place = f"left:{(bar.begin - first) * scale:.4f}%;top:{_ROW * bar.depth}px"
        title = escape(f"{what} {attrs}".strip())
        if bar.is_event:
            yield f'<div class="mark" style="{place}" title="{title}"></div>'
            continue
        style = f"{place};width:{(end - bar.begin) * scale:.4f}%;background:{colours[bar.name]}"
        kind = "bar open" if bar.end is None else "bar"
        yield f'<div class="{kind}" style="{style}" title="{title}">{escape(bar.name)}</div>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("dump", help="a file that --save-debug-rollout-data wrote, .jsonl or .pt")
    parser.add_argument("--output", help="the page to write (default: beside the dump, with .html behind its name)")
    options = parser.parse_args()
    dump = Path(options.dump)
    page = Path(options.output or f"{dump}.html")
    found = (getattr(sample, "trace", None) for sample in leaves(read_dump(dump)))  # a sample without stages has none
    traces = [trace for trace in found if isinstance(trace, dict)]
    if not traces:
        raise UserError(f"no sample of {dump} has a trace: it was written before rollouts noted their stages")
    page.write_text(timeline_page(traces, dump.name), encoding="utf-8")
    print(f"{page} is written: {len(traces)} samples")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except UserError as error:
        common.refuse(str(error))
    sys.exit(code)
