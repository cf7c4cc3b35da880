"""Creates sandboxes by kind, and `SubprocessSandbox`, the kind without a security boundary.

A sandbox of the kind `subprocess` is created only when it is named: its commands run on this machine as this user, with
limits on each process.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.inside import files
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.monitor_client import ForkServer, MonitorClient
from slime.agent.sandbox.protocol import SandboxLimits, Snapshot
from slime.errors import UserError

logger = logging.getLogger(__name__)
NO_BOUNDARY_WARNING = (
    "--sandbox subprocess is not a security boundary: code from a model runs with the rights of this user and can read "
    "and change every file, process, secret and network that this user can; use it only for code that you trust"
)


@functools.cache
def warn_without_boundary() -> None:
    """Log once that such a sandbox is not a security boundary."""
    logger.warning(NO_BOUNDARY_WARNING)


class SubprocessSandbox(MachineSandbox):
    """A sandbox with its own folder, limits and process cleanup; commands can access everything that this user can."""

    kind = "subprocess"
    boundary = False

    @property
    def python(self) -> str:
        """Path of a Python interpreter that commands can use."""
        return os.path.realpath(sys.executable)

    async def __aenter__(self) -> Self:
        if self.files is not None and self.files.root:
            raise UserError("a root file system as a snapshot needs the local sandbox: use a folder with subprocess")
        folder = _make_temporary_folder()
        self._within = folder
        self.workdir, self.home = os.path.join(folder, "workspace"), os.path.join(folder, "home")
        self._env = {"TMPDIR": os.path.join(folder, "tmp"), **self._env}
        try:
            for name in ("home", "tmp"):
                os.mkdir(os.path.join(folder, name))
            if self.files is None:
                os.mkdir(self.workdir)
            else:
                await asyncio.to_thread(shutil.copytree, self.files.path, self.workdir, symlinks=True)
            return await super().__aenter__()
        except BaseException:
            files.remove_tree(folder)
            raise

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        if self._within is not None:  # the monitor has removed it, unless it was killed
            await asyncio.to_thread(files.remove_tree, self._within)

    def _make_monitor(self) -> MonitorClient:
        spec = {
            "jail": None,
            "groups": self.limits.group_limits(),
            "remove": self._within,
            "lower": None if self.files is None else str(self.files.path),
        }
        return MonitorClient(spec, self.sandbox_id, self.server)


def _make_temporary_folder() -> str:
    return os.path.realpath(tempfile.mkdtemp(prefix="slime-sandbox-"))


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
    """Create a sandbox, without starting it; UserError if this machine cannot create one of that kind.

    `files` is the snapshot that it starts from. `env` is added to the environment of its commands. `visible` are
    folders of this machine that it sees under the same path, read-only. `devices` are device nodes that commands may
    use (`nvidia_devices()` of `slime.agent.sandbox.host_sandbox` lists those of GPUs). `image` is the image that
    containers and remote sandboxes start from. `server` forks the sandboxes of this machine. "auto" means "local":
    a sandbox without a boundary is never chosen automatically.
    """
    if kind in ("auto", "local"):
        return LocalSandbox(limits=limits, files=files, env=env, visible=visible, devices=devices, server=server)
    if kind == "subprocess":
        warn_without_boundary()
        return SubprocessSandbox(limits=limits, files=files, env=env, visible=visible, devices=devices, server=server)
    if kind in ("docker", "podman"):
        if files is not None:
            raise UserError(
                f"--sandbox {kind} starts from an image, not from a folder: build an image that holds {files.path}"
            )
        return ContainerSandbox(kind, image, limits=limits, env=env, visible=visible, devices=devices)
    if kind == "e2b":
        if files is not None or visible or devices:
            raise UserError(
                f"--sandbox {kind} starts from an image and sees no folder or device of this machine: put the files "
                "into the image"
            )
        return E2BSandbox(image, limits=limits, env=env)
    raise UserError(f"there is no sandbox {kind!r}: choose one of {', '.join(KINDS)}")


def sandbox_from(
    args: argparse.Namespace,
    *,
    files: Snapshot | None = None,
    env: Mapping[str, str] | None = None,
    visible: Sequence[str | Path] = (),
    devices: Sequence[str | Path] = (),
    image: str | None = None,
) -> AnySandbox:
    """Create the sandbox that the run's flags select; `image`, of a sample, replaces `--sandbox-image`."""
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
