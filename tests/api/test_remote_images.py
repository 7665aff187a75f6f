"""Images at other servers: only from allowed hosts, at allowed addresses, and in bounds."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from diffray.cluster.api.prompts import RemoteImages
from diffray.cluster.api.settings import ApiSettings
from diffray.components.config import InvalidField
from tests.helpers.certificates import certified
from tests.helpers.files_server import files_server

SECONDS = 1.0
CONTENT = b"an image's bytes"
MOST = 64 * 1024
NOT_FETCHED = "others are not fetched.*--allowed-media-domains"
SEEN: list[str] = []


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server, and another one whose host is not allowed."""
    with files_server({"/image": CONTENT}) as other:
        moved = {
            "/moved": "/image",
            "/twice": "/moved",
            "/thrice": "/twice",
            "/round": "/round",
            "/away": f"{other}/image",
            "/file": "file:///etc/passwd",
            "/broken": "https://a:b/",
        }
        files = {"/image": CONTENT, "/full": bytes(MOST), "/over": bytes(MOST + 1)}
        endless = {"/slow": 0.05, "/large": 0.0}
        with files_server(files, moved, endless, SEEN) as url:
            found = urlsplit(url).port
            assert found is not None
            yield found


def read(url: str, *hosts: str) -> bytes:
    settings = ApiSettings(allowed_media_domains=hosts, max_body_bytes=MOST)
    return asyncio.run(RemoteImages(settings, SECONDS).read(url))


@pytest.mark.parametrize("path", ["image", "moved", "thrice", "image?a=b#c", "full"])
def test_an_allowed_host_is_read(port: int, path: str) -> None:
    """Up to so many redirects, and as many bytes as a body may have."""
    content = bytes(MOST) if path == "full" else CONTENT
    assert read(f"http://127.0.0.1:{port}/{path}", f"127.0.0.1:{port}") == content


def test_a_name_needs_its_address_allowed_unless_that_is_public(port: int) -> None:
    """Otherwise a name of an allowed host could stand for any machine of the operator's."""
    url, name = f"http://localhost:{port}/image", f"localhost:{port}"
    with pytest.raises(InvalidField, match="localhost has no public address"):
        read(url, name)
    SEEN.clear()
    assert read(url, name, "127.0.0.1") == CONTENT
    assert [name] == SEEN  # although the connection is to the address


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("slow", "127.0.0.1 takes longer than 1 s"),
        ("large", f"it has more than {MOST} bytes"),
        ("over", f"it has more than {MOST} bytes"),
        ("round", "redirects more than 3 times"),
        ("away", f"127.0.0.1 redirects to another place: .*{NOT_FETCHED}"),
        ("file", f"127.0.0.1 redirects to another place: .*{NOT_FETCHED}"),
        ("broken", "this is not a URL"),
        ("none", "answers with status 404"),
    ],
)
def test_what_goes_wrong_is_one_sentence(port: int, path: str, message: str) -> None:
    with pytest.raises(InvalidField, match=f"^an image's URL: .*{message}") as caught:
        read(f"http://127.0.0.1:{port}/{path}", f"127.0.0.1:{port}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/image",  # only other ports are
        "https://127.0.0.1/image",
        "http://example.com@127.0.0.1:{port}/image",
        "http://127.1:{port}/image",
        "http://[::ffff:127.0.0.1]:{port}/image",
        "http://example.com.:80/image",
        "https://sub.example.com/",
        "ftp://example.com/image",
        "file://example.com/etc/passwd",
        "/etc/passwd",
        "",
        "//example.com/image",
    ],
)
def test_nothing_else_is_fetched(port: int, url: str) -> None:
    SEEN.clear()
    with pytest.raises(InvalidField, match=NOT_FETCHED):
        read(url.format(port=port), "example.com", "127.0.0.1:1")
    assert not SEEN


@pytest.mark.parametrize(
    ("url", "hosts", "message"),
    [
        ("https://example.com:b/", ["example.com"], "this is not a URL"),
        ("https://example.com/\n", ["example.com"], "this is not a URL"),
        ("https://" + "a" * 70_000, ["example.com"], "this is not a URL"),
        ("http://127.0.0.1:{port}/image", [], NOT_FETCHED),
        ("https://example.com/image", [], NOT_FETCHED),
        ("http://127.0.0.1:1/image", ["127.0.0.1:1"], r"127\.0\.0\.1 cannot be reached"),
        # It speaks no TLS.
        ("https://127.0.0.1:{port}/image", ["127.0.0.1:{port}"], "cannot be reached"),
    ],
    ids=range(7),
)
def test_what_is_out_of_reach_is_said(port: int, url: str, hosts: list[str], message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        read(url.format(port=port), *(host.format(port=port) for host in hosts))


def test_https_reaches_the_checked_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look would find another address; certificate, SNI and Host are the name's."""
    name, other, asked, told, seen = "images.test", "other.test", list[str](), list[Any](), SEEN
    files = certified(tmp_path, name)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.chain, files.key)
    tls.sni_callback = lambda _, sni, __: told.append(sni)
    look_up = socket.getaddrinfo

    def changing(host: Any, *given: Any, **options: Any) -> Any:
        host = host.decode() if isinstance(host, bytes) else host
        if host not in (name, other):
            return look_up(host, *given, **options)
        asked.append(host)
        return look_up("127.0.0.1" if asked.count(host) == 1 else "127.0.0.2", *given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    with files_server({"/image": CONTENT}, seen=seen, tls=tls) as server:
        port = urlsplit(server).port

        def fetch(host: str) -> bytes:
            asked.clear()
            told.clear()
            seen.clear()
            return read(f"https://{host}:{port}/image", f"{host}:{port}", "127.0.0.1")

        with pytest.raises(InvalidField, match=f"{name} cannot be reached"):
            fetch(name)  # no client trusts this authority yet
        monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
        assert fetch(name) == CONTENT
        assert (asked, told, seen) == ([name], [name], [f"{name}:{port}"])
        with pytest.raises(InvalidField, match=f"{other} cannot be reached"):
            fetch(other)  # the certificate is another name's
        assert (asked, told, seen) == ([other], [other], [])


@pytest.mark.parametrize("host", ["https://example.com", "example.com/a", "*", "a:0", "", "a@b"])
def test_a_wrong_host_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_media_domains: .* is not a host; write a name"):
        ApiSettings(allowed_media_domains=(host,))
    settings = ApiSettings(allowed_media_domains=("Example.com", "[::1]:8000"))
    assert settings.allowed_media_domains == ("example.com", "[::1]:8000")
