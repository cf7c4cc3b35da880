"""JSON bodies of requests and answers: fast and standard parsers agree."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engine.embedded.http.responses import OutputPiece, columns
from slime.engine.http.client import EngineClient
from slime.engine.http.codec import parse_json, request_body, token_columns
from slime.engine.http.errors import EngineProtocolError
from slime.engine.http.protocol import GenerateResult
from slime.engine.http.transport import LONG_RESPONSE_BYTES
from tests.rows import examples

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=examples(60), deadline=None)
@given(value=plain)
def test_parse_json_agrees_with_json_loads(value: Any) -> None:
    body = json.dumps(value).encode()
    if _has_big_whole_numbers(value):
        return  # the only difference, see the next test
    assert repr(parse_json(body)) == repr(json.loads(body))


def _has_big_whole_numbers(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_big_whole_numbers, value.values() if isinstance(value, dict) else value))
    return type(value) is int and not -(2**63) <= value < 2**64


def test_numbers_beyond_64_bits_never_become_token_ids() -> None:
    body = json.dumps({"output_token_logprobs": [[-0.5, 2**70, None]]}).encode()
    assert token_columns(parse_json(body)["output_token_logprobs"]) is None
    assert token_columns([[-0.5, 2**70, None]]) is None
    assert token_columns([[10**400, 1, None]]) is None


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": NaN}', {"a": math.nan}),
        (b"[-Infinity, Infinity]", [-math.inf, math.inf]),
        (b'"\\ud800"', "\ud800"),
        (b'"a\xff"', "a\ufffd"),
        (b"18446744073709551615", 2**64 - 1),
        (b"[0.1, 1e400]", [0.1, math.inf]),
    ],
)
def test_parse_json_reads_edge_case_values(body: bytes, value: Any) -> None:
    assert repr(parse_json(body)) == repr(value)


@pytest.mark.parametrize("body", [b"", b"{", b"<html>", b'{"a": 1} x', b"\xff\xfe"])
def test_parse_json_raises_value_error_on_invalid_json(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(body)


@settings(max_examples=examples(50), deadline=None)
@given(
    payload=st.dictionaries(st.text(), plain, max_size=3),
    ids=st.none() | st.lists(st.integers() | st.integers(0, 200_000)),
)
def test_request_body_agrees_with_json_dumps(payload: dict[str, Any], ids: list[int] | None) -> None:
    if ids is not None:
        payload["input_ids"] = ids
    assert repr(sorted(json.loads(request_body(payload)).items(), key=repr)) == repr(
        sorted(json.loads(json.dumps(payload)).items(), key=repr)
    )


def _column(kind: str, *values: float) -> str:
    return base64.b64encode(np.array(values, dtype=f"<{kind}").tobytes()).decode()


@pytest.mark.parametrize(
    "entries",
    [None, 3, "ab", [1], ["ab"], [{}], [[]], [[0.5]], [[None, 5]], [[True, 5]], [[0.5, True]], [[0.5, 1.0]],
     [[math.nan, 5]], [[0.5, 5], [math.inf, 6]], [[0.5, 5], None]],
)  # fmt: skip
def test_rejects_malformed_log_prob_entries(entries: object) -> None:
    assert token_columns(entries) is None


def test_token_columns_are_exact() -> None:
    columns = token_columns([[-0.5, 5, None], (0, 2**40), [-0.1, 7, "x", 4]])
    assert columns is not None
    ids, log_probs = columns
    assert ids.tolist() == [5, 2**40, 7]
    assert log_probs.tolist() == [-0.5, 0.0, -0.1]
    narrow = token_columns([[-0.5, 5], [-0.25, 6]])
    assert narrow is not None
    assert (narrow[0].dtype, narrow[1].dtype) == (np.int32, np.float32)
    empty = token_columns([])
    assert empty is not None
    assert [len(column) for column in empty] == [0, 0]


@pytest.mark.parametrize("values", [[-0.5, -0.25, -1e-30], [-0.1, -0.3, -17.0]])
def test_engine_columns_match_its_token_list(values: list[float]) -> None:
    ids = [5, 151_935, 0]
    piece = OutputPiece(ids, values, [], "", 3, [("7", 0)], 0, {"type": "length", "length": 3})
    found, listed = (
        token_columns(columns(piece)),
        token_columns([[v, t, None] for v, t in zip(values, ids, strict=True)]),
    )
    assert found is not None
    assert listed is not None
    for one, other in zip(found, listed, strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    assert found[0].flags.owndata


@pytest.mark.parametrize(
    "broken",
    [{}, {"ids": _column("i4", 1)}, {"ids": _column("i4", 1), "logprobs": "?"}, {"ids": 3, "logprobs": 4},
     {"ids": _column("i4", 1, 2), "logprobs": _column("f4", -0.5)}, {"ids": "AAA=", "logprobs": ""},
     {"ids": _column("i4", 1), "logprobs": _column("f4", math.nan)}, {"ids": _column("i4", 1), "logprobs": "AAAAAAAA AAA="}],
)  # fmt: skip
def test_rejects_malformed_columns(broken: dict[str, Any]) -> None:
    assert token_columns(broken) is None
    meta = {"finish_reason": {"type": "length"}, "completion_tokens": 1, "output_token_logprobs": broken}
    with pytest.raises(EngineProtocolError, match="output_token_logprobs"):
        GenerateResult.from_json({"text": "", "meta_info": meta}, url="http://engine")


def _answer(tokens: int) -> dict[str, Any]:
    ids = list(range(100_000, 100_000 + tokens))
    return {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        },
    }


def _result_from_body(body: bytes) -> GenerateResult:
    """The result that a client parses from an answer with this body."""

    async def main() -> GenerateResult:
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        application = web.Application()
        application.router.add_post("/generate", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with EngineClient(site.name.rstrip("/"), timeout_s=120) as client:
                return await client.generate_result({"input_ids": [1]})
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_long_answer_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    from_json = GenerateResult.from_json.__func__  # type: ignore[attr-defined]

    def recording(cls: type[GenerateResult], answer: object, **how: Any) -> GenerateResult:
        readers.append(threading.current_thread().name)
        return from_json(cls, answer, **how)

    monkeypatch.setattr(GenerateResult, "from_json", classmethod(recording))
    for tokens in (3, 5000):
        body = json.dumps(_answer(tokens)).encode()
        result = _result_from_body(body)
        assert result.token_ids == list(range(100_000, 100_000 + tokens))
        assert result.log_probs == [-0.5] * tokens
        assert readers.pop().startswith("engine-answers") == (len(body) >= LONG_RESPONSE_BYTES)


def test_nan_or_invalid_json_raises_and_invalid_utf8_is_replaced() -> None:
    body = json.dumps(_answer(2)).encode()
    with pytest.raises(EngineProtocolError, match=r"not a list of \[finite log-prob"):
        _result_from_body(body.replace(b"-0.5", b"NaN"))
    with pytest.raises(EngineProtocolError, match="not JSON"):
        _result_from_body(body[:-1])
    assert _result_from_body(body.replace(b'"x"', b'"\xff\\ud800"')).text == "\ufffd\ud800"
    with pytest.raises(EngineProtocolError, match=r"not a list of \[finite log-prob"):
        _result_from_body(body.replace(b"100000", b"1" * 30))


def test_input_ids_may_be_a_numpy_array() -> None:
    ids = np.arange(5, dtype=np.int32)
    ids.flags.writeable = False
    params = {"sampling_params": {"temperature": 0.5}}
    assert request_body({"input_ids": ids, **params}) == request_body({"input_ids": ids.tolist(), **params})
