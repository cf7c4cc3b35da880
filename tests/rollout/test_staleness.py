"""Staleness of groups: versions, handling of stale groups, and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from slime.data.sample import Sample
from slime.rollout.base_types import leaves
from slime.rollout.metrics import staleness_metrics
from slime.rollout.outcomes import group_version, prompts_of
from slime.rollout.sglang_rollout import generate_rollout

STATUS = Sample.Status


def sample(*spans: tuple[str | None, int], mask: list[int] | None = None, **fields: Any) -> Sample:
    length = sum(count for _, count in spans)
    return Sample(
        tokens=[1] * (2 + length),
        response_length=length,
        response="7" * length,
        loss_mask=mask or [int(version is not None) for version, count in spans for _ in range(count)],
        rollout_log_probs=[-1.0] * length,
        version_spans=[list(span) for span in spans],
        **fields,
    )


def test_group_version_is_that_of_the_oldest_trained_token() -> None:
    assert group_version([sample(("4", 2)), [sample(("6", 1)), sample(("3", 1))]]) == 3
    assert group_version([sample(("4", 2), ("1", 2), mask=[1, 1, 0, 0])]) == 4
    assert group_version([sample((None, 2)), Sample()]) is None


def test_staleness_metrics_count_samples_and_tokens() -> None:
    samples = [sample(("3", 2), ("5", 2)), sample(("5", 4)), sample((None, 1), ("4", 1))]
    assert staleness_metrics(samples, 5) == {
        "rollout/staleness/mean": pytest.approx((2 + 0 + 1) / 3),
        "rollout/staleness/max": 2.0,
        "rollout/off_policy_token_frac": pytest.approx(3 / 9),
        "rollout/mixed_version_frac": pytest.approx(1 / 3),  # tokens without an engine have no version
    }
    assert staleness_metrics([Sample()], 5) == {}


def test_restarted_sample_keeps_only_its_prompt_and_index() -> None:
    old = sample(("1", 3), status=STATUS.COMPLETED, reward=1.0, index=4, prompt="p", metadata={"start_rollout_id": 1})
    old.weight_versions = ["1"]
    assert prompts_of([old]) == [old]
    assert old == Sample(tokens=[1, 1], index=4, prompt="p")
    assert prompts_of([[sample(("1", 1))]]) is None  # a fan-out no longer has its prompt


@pytest.mark.parametrize("policy", ["regenerate", "drop"])
def test_stale_partial_response_is_regenerated_or_dropped(
    policy: str, engine: Any, make_runtime: Any, prompts: Any, tokenizer: Any
) -> None:
    engine.version = "5"
    runtime = make_runtime(
        [engine.url],
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        partial_rollout=True,
        max_weight_staleness=1,
        stale_samples=policy,
        rm_type="random",
    )
    source = prompts(["a", "b"], n=1)
    cut = source.groups[0][0]
    cut.tokens = tokenizer.encode("a99", add_special_tokens=False)
    cut.response, cut.response_length, cut.loss_mask, cut.rollout_log_probs = "99", 2, [1, 1], [-1.0, -1.0]
    cut.version_spans, cut.status = [["3", 2]], STATUS.ABORTED
    output = generate_rollout(runtime.args, 5, source)
    assert output.metrics is not None
    assert (output.metrics["rollout/stale_groups"], output.metrics["rollout/thrown_away_tokens"]) == (1.0, 2.0)
    (taken,) = leaves(output.samples)
    assert (taken.prompt, taken.response) == ("a" if policy == "regenerate" else "b", "7")
    assert taken.version_spans == [["5", 2]]
