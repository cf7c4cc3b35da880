"""What answers at the engines' addresses: it decides which calls an update may use."""

from typing import Literal

EngineKind = Literal["embedded", "sglang"]
