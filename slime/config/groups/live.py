"""A model that serves real clients and learns from what they say about its answers."""

from dataclasses import dataclass

from slime.config.flag import above, at_least, flag


@dataclass(frozen=True, kw_only=True)
class LiveFlags:
    """A live service"""

    live_judge_path: str | None = flag(
        None,
        "serve clients and train on their conversations: a function (args, exchange) that judges an answer by what the "
        "client said next",
        metavar="PATH",
    )
    live_filter_path: str | None = flag(
        None, "function (exchange) that says True where an exchange may be kept and trained on", metavar="PATH"
    )
    live_idle_timeout: float = flag(
        600.0, "seconds of silence after an answer, after which a conversation is over", check=above(0)
    )
    live_max_conversations: int = flag(
        4096, "conversations held at once; beyond, the one that was silent longest is let go", check=at_least(1)
    )
