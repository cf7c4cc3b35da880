"""Sessions: what talks to the model over several turns, from our own loops to somebody's command-line agent."""

# ruff: noqa: RUF009 (`flag` declares a dataclass field)

from dataclasses import dataclass

from slime.config.flag import at_least, between, flag


@dataclass(frozen=True, kw_only=True)
class AgentFlags:
    """Agents and sessions"""

    max_turns: int | None = flag(
        None, "most turns of one session, or of a multi-turn generate function", check=at_least(1)
    )
    session_max_tokens: int | None = flag(
        None, "most tokens that one session may sample, over all its turns", check=at_least(1)
    )
    strict_tokens: bool = flag(
        False, "a client that edits, compacts or branches its history is refused, instead of becoming another sample"
    )
    agent_server_port: int | None = flag(
        None,
        "port of the OpenAI and Anthropic endpoints that agents talk to",
        check=between(1, 65535),
        derived="a free one",
    )
    agent_public_url: str | None = flag(
        None,
        "base URL under which sandboxes on other machines reach these endpoints (needs --host and --agent-server-port)",
        metavar="URL",
    )
