"""Flags of agents, sessions, sandboxes and the live service, which serves clients and learns from their replies."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import above, at_least, between, flag


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
        False, "refuse a client that edits, compacts or branches its history, instead of starting another sample"
    )
    agent_server_port: int | None = flag(
        None,
        "port of the OpenAI and Anthropic endpoints for agents",
        check=between(1, 65535),
        derived="a free one",
    )
    agent_public_url: str | None = flag(
        None,
        "base URL under which sandboxes on other machines reach these endpoints (needs --host and --agent-server-port)",
        metavar="URL",
    )
    sandbox: str = flag(
        "auto",
        "where agents and tools execute the model's code; auto: local, which needs namespaces; subprocess: no "
        "isolation, code has the rights of your user",
        choices=("auto", "local", "subprocess", "docker", "podman", "e2b"),
    )
    sandbox_image: str | None = flag(None, "image that sandboxes of docker, podman and e2b start from", metavar="NAME")
    sandbox_timeout: float = flag(120.0, "seconds that one command in a sandbox may take", check=above(0))
    sandbox_memory_mb: int = flag(
        4096, "MB of memory of one sandbox, for all its processes and the files that they write", check=at_least(1)
    )
    sandbox_processes: int = flag(512, "most processes of one sandbox", check=at_least(1))
    sandbox_disk_mb: int = flag(2048, "most MB that one sandbox may write to files", check=at_least(1))


@dataclass(frozen=True, kw_only=True)
class LiveFlags:
    """Live service"""

    live_judge_path: str | None = flag(
        None,
        "serve clients and train on their conversations: a function (args, exchange) that judges an answer by the "
        "client's next message",
        metavar="PATH",
    )
    live_filter_path: str | None = flag(
        None, "function (exchange) that returns True if the exchange may be kept and trained on", metavar="PATH"
    )
    live_idle_timeout: float = flag(
        600.0, "seconds after an answer without a new message, after which a conversation ends", check=above(0)
    )
    live_max_conversations: int = flag(
        4096, "most conversations held at once; beyond that, the one that is idle longest is evicted", check=at_least(1)
    )
