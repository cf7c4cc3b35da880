"""Device nodes in sandboxes: only requested ones are visible, and only character devices are accepted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.agent.sandbox import make_sandbox
from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.host_sandbox import MachineSandbox, check_devices, nvidia_devices
from slime.errors import UserError
from tests.agent.sandbox.boxes import LOCAL, inside


@pytest.fixture
def node() -> Iterator[str]:
    """Temporary device node with the device number of /dev/zero."""
    path = f"/dev/slime-{os.urandom(6).hex()}"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device node takes root")
    os.chmod(path, 0o666)
    try:
        yield path
    finally:
        os.unlink(path)


@pytest.mark.parametrize("way", LOCAL)
def test_requested_device_is_usable_and_is_hidden_otherwise(way: str, node: str) -> None:
    async def works(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec(f"head -c 3 {node} | od -An -tx1")).out.split() == ["00"] * 3
        assert (await sandbox.exec(f"echo x > {node}")).code == 0
        assert (await sandbox.exec(f"rm {node}")).code != 0

    async def is_hidden(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec(f"test -e {node}")).code == 1

    inside(way, works, devices=[node])
    inside(way, is_hidden)
    assert os.path.exists(node)


def test_accepts_only_character_devices_below_dev(tmp_path: Path) -> None:
    assert check_devices(["/dev/null", "/dev/../dev/null"]) == ("/dev/null",)
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path / "file", "there is no device .*/file to give"),
        ("/dev/nvidia99", "there is no device /dev/nvidia99"),
        ("/dev/../etc/passwd", "there is no device /etc/passwd"),
        ("/dev/shm", "/dev/shm is not a character device"),
    ):
        with pytest.raises(UserError, match=said):
            make_sandbox("subprocess", devices=[path])
    with pytest.raises(UserError, match="sees no folder or device of this machine"):
        make_sandbox("e2b", image="task", devices=["/dev/null"])


def test_nvidia_devices_lists_the_nodes_of_the_cards(tmp_path: Path) -> None:
    names = ["nvidia0", "nvidia11", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl", "nvidia-caps/nvidia-cap1"]
    for name in (*names, "nvidia-modeset", "null", "sda"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert nvidia_devices(tmp_path) == sorted(str(tmp_path / name) for name in names)
    assert nvidia_devices(tmp_path / "none") == []


def test_container_devices_are_passed_as_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ContainerSandbox("docker", "task:1", devices=["/dev/zero", "/dev/null"]).create_command()
    assert "--device /dev/null --device /dev/zero" in " ".join(words)
