"""Outcomes of tool calls, summed over a rollout."""

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.rollout.metrics import rollout_metrics


def tool_metrics(*noted):
    samples = [
        Sample(index=i, group_index=0, reward=1.0, response_length=2, metadata=dict(metadata))
        for i, metadata in enumerate(noted)
    ]
    found = rollout_metrics(derive(Config(rollout_batch_size=1)), samples, 1.0)
    return {name: value for name, value in found.items() if name.startswith("agent/")}


def test_tool_calls_are_summed_by_outcome():
    first = {"tool_calls": {"calls": 3, "ok": 2, "timeout": 1, "seconds": 1.5}}
    second = {"tool_calls": {"calls": 2.0, "ok": 1.0, "crashed": 1.0, "seconds": 0.25, "cut_results": 1.0}}
    assert tool_metrics(first, {}, second) == {
        "agent/tool_calls": 5.0,
        "agent/tool_failures": 2.0,
        "agent/tool_ok": 3.0,
        "agent/tool_timeout": 1.0,
        "agent/tool_crashed": 1.0,
        "agent/tool_seconds": 1.75,
        "agent/tool_cut_results": 1.0,
    }


def test_tool_metrics_ignore_plugin_metadata_of_another_shape():
    assert tool_metrics({"tool_calls": 7}, {"tool_calls": [{"name": "add"}]}, {}) == {}
    assert tool_metrics({"tool_calls": {"calls": 1, "ok": 1, "note": "x"}})["agent/tool_failures"] == 0.0
