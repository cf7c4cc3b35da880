"""How training processes get to know each other.

Invariant: nobody else meets with them. On one machine that is a file that only this user can open; over several nodes a
store that rank 0 serves at its node's address and nowhere else, whose keys begin with what only this run knows.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Meeting:
    """`file`, or the `port` at `host` where rank 0 serves; `address` is the one by whose interface a rank talks to the
    others (None: as its environment says)."""

    file: str = ""
    host: str = ""
    port: int = 0
    prefix: str = ""
    address: str | None = None

    @classmethod
    def served(cls, host: str, port: int) -> Self:
        return cls(host=host, port=port, prefix=secrets.token_hex(16))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
