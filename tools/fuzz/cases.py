"""Requests to try a server with: the case of a number and a seed is always the same."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from diffray.cluster.api.openapi import BODIES
from diffray.cluster.api.operations import OPERATED
from tools.fuzz.values import SPECIAL, anything, text, value_of

PATHS: Final = tuple(path for path in BODIES if path not in OPERATED)
FIELDS: Final = {path: sorted(BODIES[path].model_fields) for path in PATHS}
NEEDED: Final = {
    "/v1/chat/completions": ("messages", "max_tokens"),
    "/v1/completions": ("prompt", "max_tokens"),
    "/v1/responses": ("input", "max_output_tokens"),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
FOREIGN: Final = (
    "tools",
    "length_penalty",
    "response_format",
    "best_of",
    "audio",
    "other",
    "guided_json",
)
REPORTS: Final = (
    *("/health", "/version", "/load", "/metrics", "/docs", "/openapi.json", "/v1/models"),
    *("/v1/models/", "/v1/models/%00%ff", "/v1/models/demo", "//health", "/../etc", "/nothing"),
    "/v1/chat/completions/",
)
JSON_TYPE: Final = ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON")
OTHER_TYPES: Final = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


@dataclass(frozen=True, slots=True)
class Case:
    """One request; `kind` is what it tries."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def case(seed: int, number: int, *, heavy: bool = True) -> Case:
    """Return a run's case of a number; `heavy` ones send megabytes."""
    rng = random.Random(f"{seed}:{number}")
    kinds: dict[Callable[[random.Random], Case], float] = {
        fields: 70,
        broken_text: 12,
        wrong_type: 4,
        report: 8,
        twice: 3,
        megabytes: 1.5 if heavy else 0,
    }
    (make,) = rng.choices(list(kinds), list(kinds.values()))
    return make(rng)


def body_of(path: str, rng: random.Random) -> dict[str, Any]:
    """Return a body with what it needs, mostly right, and up to four fields more."""
    own = FIELDS[path]
    names = [*NEEDED[path], *rng.sample(own, rng.randint(0, min(4, len(own))))]
    if rng.random() < 0.1:
        names.append(rng.choice(FOREIGN))
    body = {name: value_of(name, rng) for name in names}
    if "stream" in FIELDS[path] and rng.random() < 0.3:
        body["stream"] = True
    if rng.random() < 0.05:
        body.pop(rng.choice(names), None)
    if rng.random() < 0.03:
        body[text(rng)] = anything(rng)
    return body


def encoded(value: Any, rng: random.Random) -> bytes:
    """Return JSON text; now and then with characters as they are, where they can be."""
    if rng.random() < 0.3:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return json.dumps(value).encode()


def posted(kind: str, path: str, body: bytes, rng: random.Random) -> Case:
    return Case(kind, "POST", path, body, {"Content-Type": rng.choice(JSON_TYPE)})


def fields(rng: random.Random) -> Case:
    path = rng.choice(PATHS)
    return posted("fields", path, encoded(body_of(path, rng), rng), rng)


def broken_text(rng: random.Random) -> Case:
    """Cut, double, overwrite or replace the text of a body."""
    path = rng.choice(PATHS)
    body = bytearray(encoded(body_of(path, rng), rng))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(6):
            case 0:
                del body[at:]
            case 1:
                del body[at : at + 3]
            case 2:
                body[at:at] = body[at : at + 20]
            case 3:
                body[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                body[at:at] = rng.choice((b"NaN", b"1e999", b'"', b"}", b"[[[", b"\\ud800", b"\0"))
            case _:
                body[:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"//", b"[", b"1", b""))
    return posted("broken text", path, bytes(body), rng)


def wrong_type(rng: random.Random) -> Case:
    path = rng.choice(PATHS)
    kind = rng.choice(OTHER_TYPES)
    headers = {"Content-Type": kind} if kind else {}
    return Case("wrong type", "POST", path, encoded(body_of(path, rng), rng), headers)


def report(rng: random.Random) -> Case:
    method = rng.choice(("GET", "GET", "GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH"))
    headers = {
        "X-Request-Id": rng.choice(
            ("mine", "x" * 300, "a b", "{}", "\u00e9".encode().decode("l1"))
        ),
        "Authorization": rng.choice(("Bearer x", "Bearer", "", "Basic eDp5", "x" * 2000)),
        "Accept": rng.choice(("*/*", "text/html", "x" * 100)),
        "Host": rng.choice(("x", "[", "a:b:c", "[::1", "x" * 500)),
    }
    chosen = {name: headers[name] for name in rng.sample(sorted(headers), rng.randint(0, 3))}
    path = rng.choice((*REPORTS, *PATHS)) + rng.choice(("", "?", "?a=b&a=%00", "?" + "x" * 3000))
    return Case("paths and headers", method, path, b"", chosen)


def twice(rng: random.Random) -> Case:
    """Say a key twice, at the top or further down."""
    path = rng.choice(PATHS)
    body = body_of(path, rng) | {"diffusion": {"block_length": 8}}
    text = json.dumps(body)
    name = rng.choice([name for name in body if json.dumps(name) + ":" in text] or ["diffusion"])
    again = f"{json.dumps(name)}: {json.dumps(value_of('n', rng))}, "
    at = text.index("{", 1 if rng.random() < 0.2 else 0) + 1
    return posted("key twice", path, (text[:at] + again + again + text[at:]).encode(), rng)


def megabytes(rng: random.Random) -> Case:
    path = rng.choice(PATHS)
    needed = NEEDED[path][0]
    size = rng.choice((10**5, 10**6, 7 * 10**6, 10**7))
    word = rng.choice((*SPECIAL, "a", "ab ", "\u20ac", "\n", '"'))
    long = word * (size // len(word.encode()))
    match rng.randrange(8):
        case 0:
            value: Any = long
            if needed == "messages":
                value = [{"role": "user", "content": long}]
            body = json.dumps({needed: value, "max_tokens": 3}).encode()
        case 1:
            body = b'{"%s": [%s1]}' % (needed.encode(), b"1," * (size // 2))
        case 2:
            body = b'{"%s": [%s""]}' % (needed.encode(), b'"",' * (size // 3))
        case 3:
            body = b'{"%s": [%s{}]}' % (needed.encode(), b"{}," * (size // 3))
        case 4:
            body = b'{"%s": %s' % (needed.encode(), b"[" * size)
        case 5:
            field = rng.choice(FIELDS[path])
            body = b'{"%s": %s}' % (field.encode(), json.dumps(long).encode())
        case 6:
            field = rng.choice(FIELDS[path])
            body = b'{"%s": [%s1]}' % (field.encode(), b"1," * (size // 2))
        case _:
            keys = b",".join(b'"%d":1' % key for key in range(size // 9))
            body = b'{"%s": {%s}}' % (rng.choice(FIELDS[path]).encode(), keys)
    return posted("megabytes", path, body, rng)
