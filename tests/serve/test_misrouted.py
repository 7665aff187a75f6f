"""Around Serve's proxies and replicas: requests for others, and paths that lead nowhere yet."""

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from diffray.cluster.serve.environment import ROUTES
from diffray.cluster.serve.misrouted import RefuseMisrouted, server_name
from diffray.cluster.serve.not_found import NotFound

OWN = b"SERVE_REPLICA_demo-Replica-abcdefgh"
NAME = b"x-diffray-server"


class Serve:
    """Answers as Serve's proxy does; keeps the headers that it was sent."""

    def __init__(self, *, healthy: bool = True, answer: Response | None = None) -> None:
        self.healthy, self.answer = healthy, answer
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = scope["headers"]
        path, scope["path"] = scope["path"], "changed"
        if path == "/-/healthz":
            answer: Response = PlainTextResponse("", 200 if self.healthy else 503)
        else:
            text = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
            answer = self.answer or PlainTextResponse(text, 404)
        await answer(scope, receive, send)


def asked(
    app: Any, path: str = "/", headers: Any = (), kind: str = "http"
) -> tuple[int, Any, dict[str, str]]:
    """Return the status, the JSON or text, and the headers of an answer."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": kind, "method": "GET", "path": path, "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    if kind == "websocket":
        assert sent == [{"type": "websocket.close"}]
        return 403, "", {}
    start, *bodies = sent
    text = b"".join(message["body"] for message in bodies).decode()
    named = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return (
        start["status"],
        json.loads(text) if "json" in named["content-type"] else text,
        named,
    )


def test_names_are_those_that_serve_gives_to_haproxy() -> None:
    from ray.serve._private.haproxy import HAProxyManager

    manager: Any = HAProxyManager  # which ray.remote has made something else of
    serves = manager.__ray_metadata__.modified_class.get_safe_name
    for name in (
        "SERVE_REPLICA::demo#Replica#abcdefgh",
        "SERVE_REPLICA::org/model-1.5 \u00e9#Replica#x",
        "SERVE_PROXY_ACTOR-fallback-0123",
    ):
        assert server_name(name) == serves(name)


@pytest.mark.parametrize("path", ["/v1/models", "/-/healthz", "/-/routes"])
def test_what_is_meant_for_another_is_refused(path: str) -> None:
    serve = Serve()
    app = RefuseMisrouted(serve, OWN)
    for others in ([(NAME, b"other")], [(NAME, OWN), (NAME, b"other")], [(NAME, b"")]):
        status, body, headers = asked(app, path, others)
        assert status == 503 and headers["retry-after"] == "2"
        assert body["error"]["code"] == "engine_unavailable"
    assert asked(app, path, [(NAME, b"other")], kind="websocket")[0] == 403
    assert serve.headers == []


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        (OWN, [(NAME, OWN), (b"a", b"b")]),
        (OWN, [(b"a", b"b")]),  # asked without HAProxy, from the same machine
        (None, [(NAME, b"from a client"), (b"a", b"b")]),  # there is no HAProxy
    ],
)
def test_what_is_for_this_one_passes_and_the_header_does_not(name: Any, headers: Any) -> None:
    serve = Serve(answer=PlainTextResponse("hello"))
    assert asked(RefuseMisrouted(serve, name), headers=headers)[:2] == (200, "hello")
    assert serve.headers == [(b"a", b"b")]


@pytest.mark.parametrize(
    ("path", "healthy", "routes", "status"),
    [
        ("/demo", True, "/demo /other", 503),  # it ends
        ("/demo/v1/models", True, "/demo /other", 503),
        ("/demos", False, "/demo /other", 404),
        ("/any", True, "/", 503),
        ("/any", False, "", 503),  # it has not been told its routes yet
        ("/any", True, "", 404),
        ("/-/routes", True, "/", 404),
    ],
)
def test_a_path_that_leads_to_a_model_is_never_unknown(
    path: str, healthy: bool, routes: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROUTES, routes)
    found, body, headers = asked(NotFound(Serve(healthy=healthy)), path)
    code = "engine_unavailable" if status == 503 else "not_found"
    assert (found, body["error"]["code"]) == (status, code)
    assert ("retry-after" in headers) == (status == 503)


def test_what_an_application_says_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUTES, "/")
    for answer in (PlainTextResponse("Path of mine", 404), Response(status_code=404)):
        answer.headers["content-type"] = "text/plain"
        text = bytes(answer.body).decode()
        assert asked(NotFound(Serve(answer=answer)))[:2] == (404, text)
