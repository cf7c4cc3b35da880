"""Custom corrections of the mismatch between engine and trainer: masked importance sampling (MIS) in two versions."""

from __future__ import annotations

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.train_infer_mismatch_helper import mis as ours
from slime.config.plugins import load_function
from slime.errors import UserError
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import build_model, make_samples

ROOT = Path(__file__).parents[2]
PLUGIN = f"{ROOT / 'tests' / 'migration' / 'plugins' / 'mis.py'}:compute_mis_weights_with_cp"
EXAMPLE = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
VANILLA = "slime.backends.megatron_utils.loss.vanilla_tis_function"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    build_model("qwen3").save_pretrained(folder)
    return folder


CASES = [
    {"tis_level": level, "tis_mode": mode, "use_rs": rs is not None, "rs_level": rs, "tis_batch_normalize": normal}
    for level, mode, rs, normal in itertools.product(
        ("token", "sequence", "geometric"), ("truncate", "clip", "mask"), (None, "token", "geometric"), (False, True)
    )
    if not (normal and level == "geometric")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_mis_example_matches_an_upstream_users_file(case: dict[str, Any]) -> None:
    """Compares an implementation by sample with one by segments of a row."""
    generator = torch.Generator().manual_seed(1)
    lengths = [4, 1, 6]
    train, rollout, loss = (torch.randn(11, generator=generator) for _ in range(3))
    mask = (torch.rand(11, generator=generator) < 0.8).float()
    rollout[2] = train[2] + 12.0  # triggers the veto
    mask[2] = 1.0
    settings = {"use_tis": True, "tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None}
    args = Namespace(**settings, rs_upper_bound=3.0, rs_veto_threshold=1e-4, **case)
    call = {
        "pg_loss": loss,
        "train_log_probs": list(train.split(lengths)),
        "rollout_log_probs": list(rollout.split(lengths)),
        "loss_masks": list(mask.split(lengths)),
        "total_lengths": [n + 3 for n in lengths],
        "response_lengths": lengths,
    }
    found, masks, metrics = ours.compute_mis_weights_with_cp(args, **call)
    theirs, their_masks, their_metrics = load_function(PLUGIN, what="a test")(args, **call)
    kept, their_kept = torch.cat(masks), torch.cat(their_masks)
    assert torch.equal(kept, their_kept)
    torch.testing.assert_close(found * mask, theirs * mask)
    torch.testing.assert_close(metrics["mis_ratio"] * mask, their_metrics["mis_ratio"] * mask)
    assert bool(case["use_rs"]) == (kept.sum() < mask.sum()).item()


def step(model: Path, out: Path, **flags: Any) -> dict[str, float]:
    carried = flags.pop("carried", {})
    run = InProcess(config_for(model, out, carried=carried, **flags))
    return run.train(0, make_samples(3, 3))["metrics"][0]


@pytest.mark.parametrize(
    ("path", "mine"),
    [
        (PLUGIN, {"tis_mode": "truncate", "tis_clip": 2.0}),
        (EXAMPLE, {"tis_mode": "truncate", "tis_clip": 2.0}),
        (VANILLA, {"tis_mode": "clip", "tis_clip": 2.0, "tis_clip_low": 0.5}),
        (ICEPOP, {"tis_mode": "mask", "tis_clip": 2.0, "tis_clip_low": 0.5}),
    ],
    ids=["users_file", "example", "vanilla", "icepop"],
)
def test_custom_tis_functions_match_the_built_in_flags(
    path: str, mine: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    bounds = {"carried": {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0}}
    own = step(model, tmp_path, use_tis=True, **mine)
    found = step(model, tmp_path, use_tis=True, custom_tis_function_path=path, **mine, **bounds)
    plain = step(model, tmp_path)
    for name in ("train/loss", "train/pg_loss", "train/grad_norm"):
        assert found[name] == pytest.approx(own[name], rel=1e-5, abs=1e-7), name
    assert abs(found["train/grad_norm"] - plain["train/grad_norm"]) > 1e-3
    ratio, out = ("tis", "tis_clipfrac") if "tis" in path.rpartition(".")[2] or path == ICEPOP else ("mis_ratio", None)
    assert found[f"train/{ratio}"] == pytest.approx(own["train/tis"], rel=1e-5)
    if out is not None:
        assert found[f"train/{out}"] == pytest.approx(own["train/tis_clipfrac"], rel=1e-5)


def test_example_mis_yaml_matches_the_built_in_correction(model: Path, tmp_path: Path) -> None:
    file = yaml.safe_load((ROOT / "examples" / "train_infer_mismatch_helper" / "mis.yaml").read_text())
    carried = {name: file.pop(name) for name in ("tis_lower_bound", "tis_upper_bound")}
    found = step(model, tmp_path, custom_tis_function_path=EXAMPLE, carried=carried, **file)
    own = step(model, tmp_path, use_tis=True, tis_mode="truncate", tis_clip=2.0)
    assert found["train/loss"] == pytest.approx(own["train/loss"], rel=1e-5)


def test_rs_bounds_get_defaults_only_for_the_built_in_correction(model: Path, tmp_path: Path) -> None:
    """Defaults of the built-in correction do not replace bounds that were left out."""
    given = config_for(
        model, tmp_path, use_tis=True, use_rs=True, custom_tis_function_path=PLUGIN, rs_veto_threshold=0.1
    )
    assert (given.rs_level, given.rs_lower_bound, given.rs_upper_bound) == (None, None, None)
    own = config_for(model, tmp_path, use_tis=True, use_rs=True, tis_clip=3.0)
    assert (own.rs_level, own.rs_lower_bound, own.rs_upper_bound) == ("token", 0.0, 3.0)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("pg_loss", r"must return \(pg_loss, masks, metrics\)"),
        ("(pg_loss.mean(), loss_masks, {})", "must return a loss for each token"),
        ("(pg_loss, loss_masks[:1], {})", "must return a loss for each token, and masks as long as the responses"),
        ("(pg_loss, loss_masks, {'x': pg_loss[:2]})", "the metric x must be one number, or one for each token"),
    ],
)
def test_invalid_tis_return_values_are_rejected(returned: str, sentence: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        f"def tis(args, *, pg_loss, loss_masks, **kwargs):\n    return {returned}\n",
    )
    path = f"{tmp_path / 'wrong.py'}:tis"
    with pytest.raises(UserError, match=sentence):
        step(model, tmp_path, use_tis=True, custom_tis_function_path=path)


def test_tis_metrics_may_be_plain_numbers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text(
        "def tis(args, *, pg_loss, **kwargs):\n    return pg_loss, None, {'a': 0.5, 'b': pg_loss.new_ones(1)}\n"
    )
    found = step(model, tmp_path, use_tis=True, custom_tis_function_path=f"{tmp_path / 'numbers.py'}:tis")
    assert (found["train/a"], found["train/b"]) == (pytest.approx(0.5), pytest.approx(1.0))
