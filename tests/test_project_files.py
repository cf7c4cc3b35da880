"""The files of a public project: Dockerfile, workflows, templates, citation. The image is built where a builder works."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
STAGES = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
BUILDERS = {"docker": ["docker", "info"], "buildah": ["buildah", "info"], "podman": ["podman", "info"]}


def builder() -> str | None:
    """Returns a program that can build images here."""
    for name, asks in BUILDERS.items():
        if shutil.which(name) and subprocess.run(asks, capture_output=True).returncode == 0:
            return name
    return None


@pytest.mark.parametrize("stage", STAGES, ids=[stage.split()[2] for stage in STAGES])
def test_stage_of_the_dockerfile_is_sound(stage: str) -> None:
    image = stage.split()[0]
    assert ":" in image, "an image without a version"
    assert "latest" not in image
    users = re.findall(r"^USER (\w+)", stage, re.MULTILINE)
    assert users, "the programs run as root"
    assert users[-1] != "root"
    assert f"useradd --create-home {users[-1]}" in stage
    for line in re.findall(r"^COPY (.+)$", stage, re.MULTILINE):
        *sources, _target = line.split()
        assert [source for source in sources if not (ROOT / source).exists()] == []
    if "apt-get install" in stage:
        assert "--no-install-recommends" in stage
        assert "rm -rf /var/lib/apt/lists" in stage
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"'\.\[([\w,]+)\]'", stage):
        assert set(names.split(",")) <= set(extras)


@pytest.mark.long
def test_cpu_image_builds_and_prints_the_version() -> None:
    program = builder()
    if program is None:
        pytest.skip("no Docker, Buildah or Podman works on this machine")
    build = [program, "build", "--target", "cpu", "--tag", "slime-test:cpu", str(ROOT)]
    subprocess.run(build, check=True)
    if program != "buildah":
        done = subprocess.run([program, "run", "--rm", "slime-test:cpu", "version"], capture_output=True, text=True)
        assert done.stdout.startswith("slime "), done.stderr


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            program, *words = command.split()
            known = set(words) <= targets if program == "make" else (ROOT / program).is_file()
            assert known, f"{file.name}: {command}"


def test_templates_and_citation_parse() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= set(form), file.name
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


def test_pre_commit_uses_the_pinned_ruff() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pin = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert hooks[0]["rev"] == f"v{pin[1]}"
