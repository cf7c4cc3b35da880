"""Judge an answer by what the user says next: --live-judge-path examples/plugins/live_judge.py"""

from typing import Any

from slime.agent.interaction import Exchange, Verdict


def live_judge(args: Any, exchange: Exchange) -> Verdict | None:
    """Thanks: right. A correction: wrong, and how it should be. The same question again: wrong. Else: nobody knows."""
    said = exchange.next_user_turn
    if said is None:
        return None
    if said.lower().startswith("thanks"):
        return Verdict(1.0)
    if said.lower().startswith("no,"):
        return Verdict(-1.0, hint=f"\n(hint: {said[3:].strip()})")
    return Verdict(-1.0) if said.strip() == exchange.question.strip() else None
