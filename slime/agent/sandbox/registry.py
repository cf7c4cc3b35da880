"""Which kind of sandbox: by name. None without a boundary is made unless it is asked for."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.inside import files
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.monitor_client import Box, ForkServer
from slime.agent.sandbox.protocol import SandboxLimits, Snapshot
from slime.errors import UserError

# `subprocess`: commands on this machine as this user, with limits on each process. It is no boundary, and says so.

logger = logging.getLogger(__name__)
WITHOUT_BOUNDARY = (
    "--sandbox subprocess is no boundary: what a model writes runs with the rights of this user, and can read and "
    "change every file, process, secret and network that this user can; use it for code that you trust"
)


@functools.cache
def warn_without_boundary() -> None:
    """Say once what such a sandbox does not contain."""
    logger.warning(WITHOUT_BOUNDARY)


class SubprocessSandbox(MachineSandbox):
    """A folder of its own, limits, and an end for all that it started; everything else of this user is in reach."""

    kind = "subprocess"
    boundary = False

    @property
    def python(self) -> str:
        """An interpreter that commands can use."""
        return os.path.realpath(sys.executable)

    async def __aenter__(self) -> Self:
        if self.files is not None and self.files.root:
            raise UserError("a root file system as a snapshot needs the local sandbox: use a folder with subprocess")
        folder = _new_folder()
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
        if self._within is not None:  # the monitor has done it, unless it was killed
            await asyncio.to_thread(files.remove_tree, self._within)

    def _make_box(self) -> Box:
        spec = {
            "jail": None,
            "groups": self.limits.of_the_group(),
            "remove": self._within,
            "lower": None if self.files is None else str(self.files.path),
        }
        return Box(spec, self.sandbox_id, self.server)


def _new_folder() -> str:
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
    """A sandbox that is not started yet.

    `files` is what it starts with; `env` what its commands find in their environment, besides the usual; `visible` are
    folders of this machine that are there under the same path, read-only; `devices` are device nodes that commands may
    use (`nvidia_devices()` of `slime.agent.sandbox.host_sandbox` names those of GPUs); `image` is what sandboxes start from
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
