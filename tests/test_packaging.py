"""Packaging: every dependency is pinned, the pins are compatible, and `make` announces its downloads."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_PINNED = {"sglang", "wandb"}
"""Optional dependencies that only the user installs, with an extra."""
VENVS = ("VENV", "SGLANG_VENV", "ROUTER_VENV")


def pins(file: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def requirements() -> list[Requirement]:
    extras = [word for words in PROJECT["optional-dependencies"].values() for word in words]
    return [Requirement(word) for word in (*PROJECT["dependencies"], *extras)]


def test_every_dependency_has_a_compatible_pin() -> None:
    pinned = pins("constraints.txt")
    asked = [one for one in requirements() if one.name not in NOT_PINNED]
    assert [one.name for one in asked if canonicalize_name(one.name) not in pinned] == []
    assert [str(one) for one in asked if pinned[canonicalize_name(one.name)] not in one.specifier] == []


def test_no_dependency_except_ray_uses_an_extra() -> None:
    """pip warns about unknown extras, and their spelling differs between versions. The exception is Ray: its extra has
    had the same name since Ray 1, and `ray job submit` needs it."""
    assert [str(one) for one in requirements() if one.extras and one.name != "ray"] == []


def test_requirements_txt_lists_the_dependencies_and_the_constraints() -> None:
    """`pip install -r requirements.txt` installs the same packages as `make`, so `pip install -e .` adds none."""
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "-c constraints.txt"
    assert lines[1:] == sorted(Requirement(word).name for word in PROJECT["dependencies"])


def test_triton_pin_matches_the_torch_wheel_from_pypi() -> None:
    """The torch wheels for Linux on PyPI require an exact version, the CPU builds do not. The pin must fit both."""
    pinned = pins("constraints.txt")
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")


@pytest.mark.parametrize("target", ["quickstart", "lint", "example-smollm2", "test-sglang"])
def test_make_announces_downloads_before_installing(target: str, tmp_path: Path) -> None:
    places = [f"{name}={tmp_path / name}" for name in VENVS]
    done = subprocess.run(["make", "--dry-run", target, *places], cwd=ROOT, capture_output=True, text=True, check=True)
    said, installs = "", 0
    for line in done.stdout.splitlines():
        if line.startswith("touch"):  # end of one installation step
            said = ""
        elif line.startswith("echo") and "downloads about" in line:
            said = line
        elif " -m pip install " in line:
            installs += 1
            venv = line.partition("/bin/python")[0]
            assert f"into {venv}:" in said, line
    assert installs > 0


def test_wheel_has_every_data_file_of_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["slime"]
    packaged = {path for pattern in patterns for path in (ROOT / "slime").glob(pattern)}
    files = {path for path in (ROOT / "slime").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert sorted(map(str, files - packaged)) == []
