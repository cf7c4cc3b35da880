"""GPU detection against a fake nvidia-smi, which is a real program on the PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config import devices
from slime.config.devices import nvidia_gpu_count, nvidia_gpu_memory

TWO_GPUS = """#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H200 (UUID: GPU-a)"; echo "GPU 1: NVIDIA H200 (UUID: GPU-b)";;
  --query-gpu=memory.total) echo 143771; echo 81559;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(devices, "_DRIVER_FOLDER", tmp_path / "no-driver")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def install(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)


def test_counts_visible_gpus_and_returns_the_smallest_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine, TWO_GPUS)
    assert nvidia_gpu_count() == 2
    assert nvidia_gpu_memory() == 81559 * 2**20
    for visible, count in (("1", 1), ("0,1,2", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-a", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert nvidia_gpu_count() == count, visible


def test_failing_nvidia_smi_counts_as_no_gpu(machine: Path) -> None:
    install(machine, "#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert nvidia_gpu_count() == 0
    assert nvidia_gpu_memory() is None
