"""How families of models mark their reasoning (`--reasoning-parser`, SGLang's names)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Think:
    """Reasoning between two marks. `always`: an answer begins with it, whether or not the first mark is written.

    A call inside of reasoning ends it, but for `keeps_calls`.
    """

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    keeps_calls: bool = False

    @property
    def marks(self) -> tuple[str, str]:
        return self.begin, self.end


THINK = {
    "deepseek-r1": Think(always=True, keeps_calls=True),
    "deepseek-v3": Think(),
    "glm45": Think(),
    "kimi": Think("◁think▷", "◁/think▷"),
    "kimi_k2": Think(),
    "mimo": Think(),
    "minimax": Think(always=True),
    "mistral": Think("[THINK]", "[/THINK]"),
    "nemotron_3": Think(),
    "qwen3": Think(),
    "qwen3-thinking": Think(always=True),
    "interns1": Think(),
    "step3": Think(always=True, keeps_calls=True),
    "step3p5": Think(always=True, keeps_calls=True),
}
