"""Which kind of sandbox: by name. None without a boundary is made unless it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.agent.sandbox.box import ForkServer
from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.limits import SandboxLimits
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.machine import MachineSandbox
from slime.agent.sandbox.plain import SubprocessSandbox, warn_without_boundary
from slime.agent.sandbox.snapshot import Snapshot
from slime.errors import UserError

AnySandbox = MachineSandbox | ContainerSandbox | E2BSandbox
KINDS = ("auto", "local", "subprocess", "docker", "podman", "e2b")


def make_sandbox(
    kind: str = "auto",
    *,
    limits: SandboxLimits | None = None,
    files: Snapshot | None = None,
    env: Mapping[str, str] | None = None,
    visible: Sequence[str | Path] = (),
    devices: Sequence[str | Path] = (),
    image: str | None = None,
    server: ForkServer | None = None,
) -> AnySandbox:
    """A sandbox that is not started yet.

    `files` is what it starts with; `env` what its commands find in their environment, besides the usual; `visible` are
    folders of this machine that are there under the same path, read-only; `devices` are device nodes that commands may
    use (`nvidia_devices()` of `slime.agent.sandbox.devices` names those of GPUs); `image` is what sandboxes start from
    that are no part of this machine; `server` forks those of this machine. "auto" is "local": without a boundary there
    is none. UserError where there is no such kind.
    """
    if kind in ("auto", "local"):
        return LocalSandbox(limits=limits, files=files, env=env, visible=visible, devices=devices, server=server)
    if kind == "subprocess":
        warn_without_boundary()
        return SubprocessSandbox(limits=limits, files=files, env=env, visible=visible, devices=devices, server=server)
    if kind in ("docker", "podman"):
        _has_no_snapshot(kind, files)
        return ContainerSandbox(kind, image, limits=limits, env=env, visible=visible, devices=devices)
    if kind == "e2b":
        _has_none_of_this_machine(kind, files, [*visible, *devices])
        return E2BSandbox(image, limits=limits, env=env)
    raise UserError(f"there is no sandbox {kind!r}: choose one of {', '.join(KINDS)}")


def sandbox_from(
    args: Any,
    *,
    files: Snapshot | None = None,
    env: Mapping[str, str] | None = None,
    visible: Sequence[str | Path] = (),
    devices: Sequence[str | Path] = (),
    image: str | None = None,
) -> AnySandbox:
    """A sandbox as the run's flags say; `image` is a sample's own, in the place of `--sandbox-image`."""
    limits = SandboxLimits(
        seconds=args.sandbox_timeout,
        memory_mb=args.sandbox_memory_mb,
        processes=args.sandbox_processes,
        disk_mb=args.sandbox_disk_mb,
    )
    image = image or args.sandbox_image
    return make_sandbox(
        args.sandbox, limits=limits, files=files, env=env, visible=visible, devices=devices, image=image
    )


def _has_none_of_this_machine(kind: str, files: Snapshot | None, shown: Sequence[str | Path]) -> None:
    if files is not None or shown:
        raise UserError(
            f"--sandbox {kind} starts from an image and sees no folder or device of this machine: put files into it"
        )


def _has_no_snapshot(kind: str, files: Snapshot | None) -> None:
    if files is not None:
        raise UserError(f"--sandbox {kind} starts from an image, not from a folder: build one that holds {files.path}")
