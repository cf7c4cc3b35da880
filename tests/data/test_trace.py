"""Sample traces: event format, span nesting, merging, and tracing failures that leave the sample unchanged."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.data.buffer.rows import RowCodec
from slime.data.sample import Sample
from slime.data.trace import TracingErrors
from slime.rollout.debug_data import read_dump, write_dump
from slime.utils.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> TracingErrors:
    fresh = TracingErrors()
    monkeypatch.setattr("slime.data.trace.failures", fresh)
    return fresh


@pytest.fixture
def sample() -> Sample:
    return Sample(index=7, group_index=3)


def event_types_and_names(sample: Sample) -> list[tuple[str, str]]:
    return [(event["type"], event["name"]) for event in sample.trace["events"]]  # type: ignore[attr-defined]


def test_trace_records_nested_spans_and_events(sample: Sample) -> None:
    with trace_span(sample, "generate_and_rm", attrs={"turn": 1}) as outer:
        trace_event(sample, "tool_called", attrs={"exit_code": 0})
        with trace_span(sample, "reward_model"):
            pass
        outer.update({"reward": 0.5}).set("tokens", [1, 2])
    trace: dict[str, Any] = sample.trace  # type: ignore[attr-defined]
    assert {key: trace[key] for key in ("version", "sample_id", "group_id", "attempt")} == {
        "version": 1, "sample_id": 7, "group_id": 3, "attempt": 0,
    }  # fmt: skip
    assert event_types_and_names(sample) == [
        ("span_start", "generate_and_rm"),
        ("event", "tool_called"),
        ("span_start", "reward_model"),
        ("span_end", "reward_model"),
        ("span_end", "generate_and_rm"),
    ]
    begin, event, inner, inner_end, end = trace["events"]
    assert begin["span_id"] == end["span_id"] != inner["span_id"] == inner_end["span_id"]
    assert event["parent_span_id"] == inner["parent_span_id"] == inner_end["parent_span_id"] == begin["span_id"]
    assert "parent_span_id" not in begin
    assert "span_id" not in event
    assert (begin["attrs"], event["attrs"], end["attrs"]) == (
        {"turn": 1},
        {"exit_code": 0},
        {"reward": 0.5, "tokens": [1, 2]},
    )
    assert {e["trace_id"] for e in trace["events"]} == {trace["trace_id"]}
    stamps = [e["ts"] for e in trace["events"]]
    assert stamps == sorted(stamps)


def test_spans_of_concurrent_tasks_do_not_nest(sample: Sample) -> None:
    async def one(name: str, inside: asyncio.Event, go: asyncio.Event) -> None:
        with trace_span(sample, name):
            inside.set()
            await go.wait()
            trace_event(sample, f"{name} event")

    async def both() -> None:
        first, second, go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(one("a", first, go)), asyncio.create_task(one("b", second, go))]
        await first.wait()
        await second.wait()
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    events = {event["name"]: event for event in sample.trace["events"] if event["type"] != "span_end"}  # type: ignore[attr-defined]
    assert events["a event"]["parent_span_id"] == events["a"]["span_id"]
    assert events["b event"]["parent_span_id"] == events["b"]["span_id"]
    assert "parent_span_id" not in events["b"]


def test_trace_function_records_one_span_per_call(sample: Sample) -> None:
    @trace_function("sglang_generate", attrs_getter=lambda args, sample: {"seed": args["seed"]})
    async def generate(args: dict[str, int], sample: Sample) -> str:
        return "done"

    @trace_function("by_name", target="it")
    def by_name(it: Sample) -> int:
        raise KeyError("no")

    @trace_function("group_reward_model", target_getter=lambda args, pair: pair[0])
    def by_getter(args: None, pair: tuple[list[Sample], int]) -> int:
        return pair[1]

    other = Sample(index=8)
    assert asyncio.run(generate({"seed": 5}, sample)) == "done"
    with pytest.raises(KeyError):
        by_name(sample)
    assert by_getter(None, ([sample, other], 4)) == 4
    assert event_types_and_names(sample) == [
        (kind, name)
        for name in ("sglang_generate", "by_name", "group_reward_model")
        for kind in ("span_start", "span_end")
    ]
    assert sample.trace["events"][0]["attrs"] == {"seed": 5}  # type: ignore[attr-defined]
    assert sample.trace["events"][3]["attrs"] == {"error": "KeyError: 'no'"}  # type: ignore[attr-defined]
    assert event_types_and_names(other) == [("span_start", "group_reward_model"), ("span_end", "group_reward_model")]


def test_import_merges_events_and_attempts_are_numbered(sample: Sample) -> None:
    trace = bind_trace(sample)
    assert trace is sample.trace  # type: ignore[attr-defined]
    trace_event(sample, "first")
    sent = export_trace(sample)
    assert sent == trace
    there = import_trace(json.loads(json.dumps(sent)))
    trace_event(there, "over there")
    trace_next_attempt(sample)
    trace_event(sample, "second")
    assert import_trace(sample, there) is trace
    assert [(event["name"], event["attempt"]) for event in trace["events"]] == [
        ("first", 0),
        ("over there", 0),
        ("second", 1),
    ]
    fresh = Sample(index=9)
    assert export_trace(fresh) is None
    import_trace(fresh, sent)
    assert [event["name"] for event in fresh.trace["events"]] == ["first"]  # type: ignore[attr-defined]
    assert sent["events"] is not fresh.trace["events"]  # type: ignore[attr-defined]


def test_tracing_failures_are_counted_and_leave_the_sample_unchanged(
    sample: Sample, failures: TracingErrors, caplog: pytest.LogCaptureFixture
) -> None:
    sample.trace = {"version": 9}  # type: ignore[attr-defined]

    @trace_function("f", attrs_getter=lambda sample: 1 / 0)
    def traced(sample: Sample) -> str:
        return "value"

    with caplog.at_level(logging.WARNING):
        with trace_span(sample, "a") as span:
            span.set("x", 1)
        trace_event(sample, "b")
        trace_event(3, "c")
        assert export_trace(sample) is None
        assert traced(sample) == "value"
    assert failures.count == 5
    assert [record.message for record in caplog.records] == [
        "tracing failed in _begin; samples are not affected, and later failures are only counted"
    ]
    assert sample.trace == {"version": 9}  # type: ignore[attr-defined]
    trace_event(None, "nobody")
    assert failures.count == 5


@pytest.mark.parametrize("suffix", ["pt", "jsonl"])
def test_trace_survives_dict_journal_and_dump_round_trips(sample: Sample, tmp_path: Path, suffix: str) -> None:
    sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
    with trace_span(sample, "x", attrs={"odd": object, "nan": float("nan"), "set": {1}, "key": {2: (3,)}}):
        pass
    attrs = sample.trace["events"][0]["attrs"]  # type: ignore[attr-defined]
    assert attrs == {"odd": str(object), "nan": "nan", "set": [1], "key": {"2": [3]}}
    assert Sample.from_dict(sample.to_dict()).trace == sample.trace  # type: ignore[attr-defined]
    codec = RowCodec()
    assert codec.sample(1, codec.columns(sample)).trace == sample.trace  # type: ignore[attr-defined]
    config = Config(hf_checkpoint="x", n_samples_per_prompt=1)
    write_dump(tmp_path / f"0.{suffix}", 0, [sample], config)
    assert read_dump(tmp_path / f"0.{suffix}")[0][0].trace == sample.trace  # type: ignore[attr-defined, union-attr]


def test_sglang_meta_info_is_reduced_to_trace_attributes() -> None:
    meta_info = {
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "cached_tokens": 2,
        "weight_version": "3",
        "e2e_latency": 0.25,
        "spec_verify_ct": 1,
        "pd_prefill_time": 0.5,
        "output_token_logprobs": [[-0.1, 3, None]],
        "routed_experts": "AAAA",
    }
    assert build_sglang_meta_trace_attrs(meta_info) == {
        "finish_reason": "length",
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "cached_tokens": 2,
        "weight_version": "3",
        "e2e_latency": 0.25,
        "spec_verify_ct": 1,
        "pd_prefill_time": 0.5,
    }
    assert build_sglang_meta_trace_attrs(None) == {}
