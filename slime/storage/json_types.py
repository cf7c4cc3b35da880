"""Types of JSON values that were parsed or will be written; the values inside are not typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]
