"""`subprocess`: commands on this machine as this user, with limits on each process. It is no boundary, and says so."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import sys
import tempfile
from typing import Self

from slime.agent.sandbox.box import Box
from slime.agent.sandbox.inside import files
from slime.agent.sandbox.machine import MachineSandbox
from slime.errors import UserError

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
