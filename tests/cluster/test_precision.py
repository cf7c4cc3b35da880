"""`--dtype auto` depends on the CPU, and trainer and engines resolve it to the same dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.cluster import devices
from slime.cluster.devices import bfloat16_unit, choose_dtype, resolve_rollout_dtype, slow_dtype_note
from slime.cluster.local import LocalNode
from slime.cluster.node import Slot
from slime.config import Config
from slime.engine.launch import embedded_launch
from slime.train.trainer import Trainer
from tests.tiny_models import make_model_folder

X86 = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu sse avx512f {}\nbugs\t\t: swapgs\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp {}\nCPU part\t: 0xd0c\n"
LARGE = 135_000_000


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str | None:
    """Set the bfloat16 unit that this CPU reports to the parameter of the test."""
    monkeypatch.setattr(devices, "bfloat16_unit", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (X86.format("amx_bf16 avx512_bf16 amx_tile"), "amx_bf16"),
        (X86.format("avx512_bf16"), "avx512_bf16"),
        (X86.format("avx512vl"), None),
        (ARM.format("svebf16 bf16"), "bf16"),
        (ARM.format(""), None),
        ("processor : 0\n", None),
        ("", None),
    ],
    ids=["Sapphire Rapids", "Zen 4", "Ice Lake", "Neoverse V1", "Neoverse N1", "no flags", "empty"],
)
def test_detects_bfloat16_units_from_cpuinfo(tmp_path: Path, text: str, unit: str | None) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert bfloat16_unit(platform="linux", cpuinfo=cpuinfo) == unit
    assert bfloat16_unit(platform="darwin", cpuinfo=cpuinfo) is None


def test_missing_cpuinfo_means_no_bfloat16_units(tmp_path: Path) -> None:
    assert bfloat16_unit(platform="linux", cpuinfo=tmp_path / "none") is None


@pytest.mark.parametrize(
    ("unit", "parameters", "chosen"),
    [
        (None, LARGE, ("float32", "this CPU has no bfloat16 units")),
        ("amx_bf16", LARGE, ("bfloat16", "this CPU has units for it, amx_bf16")),
        ("amx_bf16", None, ("bfloat16", "this CPU has units for it, amx_bf16")),
        ("amx_bf16", 400_000, ("float32", "a small model on a CPU")),
    ],
    indirect=["unit"],
)
def test_auto_dtype_depends_on_cpu_unit_and_model_size(
    unit: str | None, parameters: int | None, chosen: tuple[str, str]
) -> None:
    assert choose_dtype("auto", "cpu", parameters) == chosen
    assert resolve_rollout_dtype("auto", "auto", "cpu", parameters) == chosen[0]
    assert choose_dtype("auto", "cuda", parameters)[0] == choose_dtype("auto", "cuda:1", parameters)[0] == "bfloat16"
    for asked in ("float32", "bfloat16"):
        assert choose_dtype(asked, "cpu", parameters) == (asked, "as asked for")
        assert resolve_rollout_dtype("auto", asked, "cpu", parameters) == asked
        assert resolve_rollout_dtype(asked, "auto", "cuda", parameters) == asked


@pytest.mark.parametrize("unit", [None, "bf16"], indirect=True)
def test_slow_dtype_note_appears_only_for_emulated_bfloat16(unit: str | None) -> None:
    said = slow_dtype_note("--dtype", "bfloat16", "cpu")
    if unit is None:
        assert said == (
            "--dtype bfloat16: this CPU has no units for it and is about 40 times slower than in float32: "
            "leave out --dtype"
        )
    else:
        assert said is None
    for dtype, device in (("auto", "cpu"), ("float32", "cpu"), ("bfloat16", "cuda")):
        assert slow_dtype_note("--dtype", dtype, device) is None


@pytest.mark.parametrize("unit", [None, "amx_bf16"], indirect=True)
@pytest.mark.parametrize("small", [True, False])
def test_trainer_and_engine_choose_the_same_dtype(
    unit: str | None, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model")
    if not small:
        monkeypatch.setattr(devices, "SMALL_MODEL", 1000)
    expected = "float32" if unit is None or small else "bfloat16"
    config = Config(hf_checkpoint=str(folder), device="cpu")
    trainer = Trainer(config, "cpu")
    assert str(trainer.dtype) == str(trainer.rollout_dtype) == f"torch.{expected}"
    seat = (Slot(LocalNode()),)
    launch = embedded_launch(
        config, "engine-0", seat, 1, seats=[seat], device="cpu", model_path="a teacher", key="the run's key"
    )
    words = launch.starts[0].command.words
    assert words[words.index("--dtype") + 1] == expected
