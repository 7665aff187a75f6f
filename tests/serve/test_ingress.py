"""A lost replica at Serve's own proxy: asked again, or told to the client."""

import asyncio
import json
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from diffray.cluster.serve.ingress import TRIES, SecondTry

BODY = [b'{"prompt": ', b'"hello"}']
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def echo(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def asked(replicas: list[str], gone: bool = False) -> tuple[list[Message], int]:
    """Return what a client gets from replicas that answer, break or are lost, and who was asked."""
    sent: list[Message] = []
    calls = iter(replicas)
    count = 0

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal count
        count += 1
        assert scope["path"] == "/model/v1"
        scope["path"] = "/v1"
        what = next(calls)
        body = await echo(receive)
        if gone:
            assert (await receive())["type"] == "http.disconnect"
        if what == "lost":
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if what == "answers":
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    parts: list[Message] = [
        {"type": "http.request", "body": part, "more_body": part is not BODY[-1]} for part in BODY
    ]
    coming = iter([*parts, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(coming)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(SecondTry(proxy)({"type": "http", "path": "/model/v1"}, receive, send))
    return sent, count


def event(message: Message) -> Any:
    body = message["body"]
    assert body.startswith(b"data: ") and body.endswith(b"\n\n") and not message["more_body"]
    return json.loads(body[6:])


def test_another_replica_gets_the_same_bytes() -> None:
    sent, count = asked(["lost", "lost", "answers"])
    assert count == 3
    assert [message["type"] for message in sent] == ["http.response.start"] + 2 * [
        "http.response.body"
    ]
    assert sent[1]["body"] == b"".join(BODY)


def test_a_broken_stream_ends_with_an_error_that_says_it_may_be_asked_for_again() -> None:
    sent, count = asked(["breaks", "answers"])
    assert count == 1, "what has begun is not begun again"
    error = event(sent[-1])["error"]
    assert error["code"] == "engine_unavailable" and "send the request again" in error["message"]


def test_after_some_replicas_the_client_is_told() -> None:
    sent, count = asked(["lost"] * 10)
    assert count == TRIES
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"2") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "engine_unavailable"


def test_a_client_that_is_gone_is_not_asked_for() -> None:
    assert asked(["lost", "answers"], gone=True) == ([], 1)
