"""Around Serve's proxies: lost replicas, unknown paths, prefixes."""

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from diffray.cluster.serve import proxy as proxies
from diffray.cluster.serve.address import PREFIX_ROUTED, ROUTES
from diffray.cluster.serve.prefix_routing import prefix_key
from diffray.cluster.serve.proxy import TRIES, ProxyMiddleware

BODY = [b'{"prompt": ', b'"hello"}']
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def echo(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def ask(app: Any, parts: list[bytes], path: str, headers: Any = ()) -> list[Message]:
    """Send a request in parts, after which the client is gone; return what the app sends."""
    sent: list[Message] = []
    coming = iter(parts)

    async def receive() -> Message:
        if (part := next(coming, None)) is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": part is not parts[-1]}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    return sent


def sent_by(
    replicas: list[str], gone: bool = False, path: str = "/model/v1"
) -> tuple[list[Message], int]:
    """Return what a client gets from replicas that answer, break or are lost, and their number."""
    calls = iter(replicas)
    count = 0

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal count
        count += 1
        assert scope["path"] == path
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

    return ask(ProxyMiddleware(proxy), BODY, path), count


def event(message: Message) -> Any:
    body = message["body"]
    assert body.startswith(b"data: ") and body.endswith(b"\n\n") and not message["more_body"]
    return json.loads(body[6:])


def test_another_replica_gets_the_same_bytes() -> None:
    sent, count = sent_by(["lost", "lost", "answers"])
    assert count == 3
    assert [each["type"] for each in sent] == ["http.response.start"] + 2 * ["http.response.body"]
    assert sent[1]["body"] == b"".join(BODY)


def test_a_request_too_large_to_keep_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "_LARGEST", len(BODY[0]))
    sent, count = sent_by(["lost", "answers"])
    assert (count, sent[0]["status"]) == (1, 503)
    monkeypatch.setattr(proxies, "_LARGEST", len(b"".join(BODY)))
    assert sent_by(["lost", "answers"])[1] == 2


def test_a_broken_stream_ends_with_an_error_that_says_to_retry() -> None:
    sent, count = sent_by(["breaks", "answers"])
    assert count == 1, "what has begun is not begun again"
    error = event(sent[-1])["error"]
    assert error["code"] == "engine_unavailable" and "send the request again" in error["message"]


def test_errors_at_anthropics_paths_have_their_shape() -> None:
    path = "/model/v1/messages"
    sent, _ = sent_by(["breaks"], path=path)
    name, data, *_ = sent[-1]["body"].decode().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    sent, _ = sent_by(["lost"] * 10, path=path)
    assert json.loads(sent[1]["body"])["error"].keys() == {"type", "message"}


def test_after_some_lost_replicas_the_client_gets_an_error() -> None:
    sent, count = sent_by(["lost"] * 10)
    assert count == TRIES
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"2") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "engine_unavailable"


def test_a_request_whose_client_is_gone_is_not_retried() -> None:
    assert sent_by(["lost", "answers"], gone=True) == ([], 1)


class Serve:
    """Answers as Serve's proxy does."""

    def __init__(self, answer: Response | None = None) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, scope["path"] = scope["path"], "changed"
        text = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
        await (self.answer or PlainTextResponse(text, 404))(scope, receive, send)


def answer_of(app: Any, path: str = "/") -> tuple[int, Any, dict[str, str]]:
    start, *bodies = ask(app, [b""], path)
    text = b"".join(message["body"] for message in bodies).decode()
    named = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return start["status"], json.loads(text) if "json" in named["content-type"] else text, named


@pytest.mark.parametrize(
    ("path", "routes", "status"),
    [
        ("/demo", "/demo /other", 503),  # it ends
        ("/demo/v1/models", "/demo /other", 503),
        ("/demos", "/demo /other", 404),
        ("/any", "/", 503),
        ("/-/routes", "/", 404),
        ("/-/routes", "", 404),
    ],
)
def test_a_path_that_leads_to_a_model_is_never_unknown(
    path: str, routes: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROUTES, routes)
    found, body, headers = answer_of(ProxyMiddleware(Serve()), path)
    code = "engine_unavailable" if status == 503 else "not_found"
    assert (found, body["error"]["code"]) == (status, code)
    assert ("retry-after" in headers) == (status == 503)


def test_an_applications_own_404_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = JSONResponse({"error": "no such model"}, 404)
    monkeypatch.setenv(ROUTES, "/")
    assert answer_of(ProxyMiddleware(Serve(own)))[:2] == (404, {"error": "no such model"})
    monkeypatch.delenv(ROUTES)
    assert answer_of(ProxyMiddleware(Serve()))[0] == 404  # the paths are not known here


SESSION, KEY = b"x-session-id", str(prefix_key({"prompt": "hello"})).encode()
LARGE = [b'{"prompt": "', *([b"x" * 100_000] * 12), b'"}']


NO_JSON = [b"{"], [b""], [b"\xff"], [b"7"], [b"[" * 9999]
# The parts of a body, and the session ids of the client; the ids passed on.
PREFIXES: list[tuple[list[bytes], list[bytes], list[bytes]]] = [
    (BODY, [], [KEY]),
    (BODY, [b"mine"], [b"mine"]),
    *((parts, [], []) for parts in (*NO_JSON, LARGE)),
]


def test_a_prefix_becomes_a_session_unless_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX_ROUTED, "demo")
    found: list[Any] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        found.append((await echo(receive), [v for n, v in scope["headers"] if n == SESSION]))
        await PlainTextResponse("ok")(scope, receive, send)

    for parts, given, sessions in PREFIXES:
        ask(ProxyMiddleware(proxy), parts, "/v1", [(SESSION, each) for each in given])
        assert found.pop() == (b"".join(parts), sessions)
