"""A judge that is a model behind a chat endpoint: of the run's engines, of a frozen model beside it, or any other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.data.json_samples import prompt_text
from slime.data.sample import Sample
from slime.engine.http.client import EngineClient
from slime.errors import UserError
from slime.rollout.rewards.tournament.judging import JudgeFailed

PROMPT = """You compare two answers to the same request.

[Request]
{question}

[Answer A]
{first}

[Answer B]
{second}

Which answer serves the request better? Do not let their order or their length sway you. Think it over shortly, then \
end with [[A]], [[B]], or [[C]] if neither is better."""
"""A judge prompt for models of a real size; a task usually has one of its own."""

_SHARES = {"A": 1.0, "B": 0.0, "C": 0.5, "TIE": 0.5}
_MARKED = re.compile(r"\[\[\s*(A|B|C|tie)\s*\]\]", re.IGNORECASE)
_BARE = re.compile(r"\s*(A|B|C|tie)\s*\.?\s*", re.IGNORECASE)


def verdict_of(text: str) -> float:
    """What a judge wrote as the first answer's share: by the last [[A]], [[B]] or [[C]], or by a letter alone.

    Anything else raises `JudgeFailed`: a text without a verdict is no tie.
    """
    marked = _MARKED.findall(text)
    bare = _BARE.fullmatch(text)
    if marked:
        return _SHARES[marked[-1].upper()]
    if bare is not None:
        return _SHARES[bare[1].upper()]
    raise JudgeFailed(f"the judge's answer has no [[A]], [[B]] or [[C]]: {text[-80:]!r}")


def said_in_the_end(sample: Sample) -> str:
    """What the judge is shown of an attempt: its last answer (`metadata["answer"]`, with tools), or all of it."""
    answer = sample.metadata.get("answer")
    return answer if isinstance(answer, str) else sample.response


def asked_for(sample: Sample) -> str:
    """The request: the prompt, of a conversation the last message that the user wrote."""
    if not isinstance(sample.prompt, list):
        return prompt_text(sample.prompt)
    return next((str(one["content"]) for one in reversed(sample.prompt) if one.get("role") == "user"), "")


@dataclass(frozen=True)
class ServedJudge:
    """Asks `POST url/v1/chat/completions`, once for each call.

    `url` is a base URL; without one it is the engines of the run, the policy as it is now, or with `model` the frozen
    model of that name beside it (`--sglang-config`). `prompt` has the fields {question}, {first} and {second};
    `question_of` and `answer_of` say what is put there, and `read` makes a share of what comes back. Greedy, unless
    `temperature` says otherwise.
    """

    url: str | None = None
    model: str | None = None
    prompt: str = PROMPT
    system: str | None = None
    question_of: Callable[[Sample], str] = asked_for
    answer_of: Callable[[Sample], str] = said_in_the_end
    read: Callable[[str], float] = verdict_of
    max_tokens: int = 512
    temperature: float = 0.0
    timeout_s: float = 120.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            filled = self.prompt.format(question="", first="<first>", second="<second>")
        except (LookupError, ValueError) as error:
            raise UserError(
                f"the judge's prompt cannot be filled in ({error!r}): its fields are {{question}}, {{first}} and "
                "{second}, and other braces are written twice"
            ) from error
        if "<first>" not in filled or "<second>" not in filled:
            raise UserError("the judge's prompt must have the fields {first} and {second}: it is shown two answers")

    async def __call__(self, args: Any, first: Sample, second: Sample) -> float:
        """1 if the model prefers the first, 0 for the second, 1/2 for neither; raises where there is no verdict."""
        content = self.prompt.format(
            question=self.question_of(first), first=self.answer_of(first), second=self.answer_of(second)
        )
        messages = [{"role": "user", "content": content}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        payload = {
            "model": self.model or "default",
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        async with EngineClient(self._address(args), timeout_s=self.timeout_s, api_key=self.api_key) as engine:
            return self.read(await engine.chat(payload))

    def _address(self, args: Any) -> str:
        if self.url is not None:
            return self.url.rstrip("/").removesuffix("/v1")
        if self.model is None:
            return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        served: dict[str, tuple[str, int]] = args.sglang_model_routers
        if self.model not in served:
            there = ", ".join(served) or "none"
            raise UserError(
                f"no model {self.model!r} is served for the judge (there is: {there}); name it in --sglang-config, or "
                "give ServedJudge a url"
            )
        host, port = served[self.model]
        return f"http://{host}:{port}"
