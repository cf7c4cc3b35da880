from __future__ import annotations

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.train.samples.batch import batch_metrics, make_train_batch
from tests.agent.byte_template import assistant, user
from tests.agent.test_session import Talk, base_sample


def agent_metrics(samples: list[Sample]) -> dict[str, float]:
    found = rollout_metrics(derive(Config(rollout_batch_size=1)), samples, 1.0)
    return {name: value for name, value in found.items() if name.startswith("agent/")}


def test_rollout_metrics_count_sessions_turns_and_tokens() -> None:
    plain, forked = Talk(), Talk()
    plain.turn(assistant("one"))
    forked.turn(assistant("one"))
    forked.turn(assistant("two"), user("left"))
    forked.messages[-2:] = []
    forked.turn(assistant("three"), user("right"))
    forked.session.abandon(forked.session.prepare(forked.request(user("more"))))
    samples = plain.session.samples(base_sample(), 1.0) + forked.session.samples(base_sample(index=8), 0.0)
    last = len(forked.sent[-1].ids) + len("three") + 2  # tokens held when the abandoned request came
    abandoned = last + len("<user\nmore><assistant\n")
    prompts = sum(len(prompt.ids) for prompt in plain.sent + forked.sent) + abandoned
    shared = sum(prompt.shared for prompt in forked.sent) + last
    tokens = sum(len(text) + 2 for text in ("one", "one", "two", "three"))
    assert agent_metrics(samples) == {
        "agent/sessions": 2.0,
        "agent/turns": 4.0,
        "agent/turns_per_session": 2.0,
        "agent/extended": 3.0,
        "agent/forked": 1.0,
        "agent/refused": 0.0,
        "agent/abandoned": 1.0,
        "agent/samples_per_session": 1.5,
        "agent/sampled_tokens": tokens,
        "agent/trained_tokens": tokens,
        "agent/retokenised_tokens": 0.0,
        "agent/shared_ratio": shared / prompts,
    }


def test_rollout_without_valid_session_records_has_no_agent_metrics() -> None:
    samples = [base_sample(metadata={"session": value}) for value in ("mine", {"turns": 1}, {"turns": "x"})]
    assert agent_metrics(samples) == {}


def test_branched_session_counts_as_one_attempt() -> None:
    forked = Talk()
    forked.turn(assistant("one"))
    for branch in range(3):
        forked.messages[3:] = []
        forked.turn(assistant(f"way {branch}"), user(f"go {branch}"))
    plain = [Talk() for _ in range(3)]
    for talk in plain:
        talk.turn(assistant("one"))
    tries = [forked.session.samples(base_sample(index=0), 1.0)]
    tries += [talk.session.samples(base_sample(index=i + 1), 0.0) for i, talk in enumerate(plain)]
    samples = [sample for one in tries for sample in one]
    config = derive(Config(rollout_batch_size=1, log_passrate=True))
    found = rollout_metrics(config, samples, 1.0)
    assert found["rollout/raw_reward"] == 0.25
    assert [found[f"passrate/pass@{k}"] for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert "passrate/pass@8" not in found
    batch = batch_metrics(make_train_batch(config, samples))
    assert batch["rollout/raw_reward"] == 0.25
    result = {"rewards": [sample.reward for sample in samples], "samples": samples}
    held_out = eval_metrics(config, {"set": result})
    assert (held_out["eval/set"], held_out["eval/set-pass@1"], held_out["eval/set-pass@4"]) == (0.25, 0.25, 1.0)
