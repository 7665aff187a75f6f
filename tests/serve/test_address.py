"""Where a server is said to be is where it is."""

from typing import Any

import pytest

from diffray.cluster.serve.address import Server, joined, reachable_url
from diffray.cluster.serve.app_config import app_config
from diffray.cluster.serve.config_file import Application, Applications, applications
from diffray.components.checkpoints.demos import TOY, examples
from tests.helpers.paths import ROOT

PROXIES = {"a": {"node_ip": "10.0.0.1"}, "b": {"node_ip": "10.0.0.2"}}


def details(host: str | None, **more: Any) -> dict[str, Any]:
    return {"http_options": {"host": host, "port": 8000}, **more}


@pytest.mark.parametrize(
    ("found", "here", "url"),
    [
        (details("127.0.0.1"), "a", "http://127.0.0.1:8000"),
        (details("::1"), "a", "http://[::1]:8000"),
        (details("0.0.0.0", proxies=PROXIES), "b", "http://10.0.0.2:8000"),
        (details("::", proxies=PROXIES), "c", "http://10.0.0.1:8000"),
        (details("0.0.0.0"), "a", "http://127.0.0.1:8000"),
        (details(None), "a", None),
        ({"applications": {}}, "a", None),
    ],
)
def test_a_url_leads_to_a_proxy(found: dict[str, Any], here: str, url: str | None) -> None:
    assert reachable_url(found, here) == url


@pytest.mark.parametrize("asked", [{}, {"port": 9000}, {"host": "0.0.0.0"}])
def test_a_running_serve_says_where_it_listens(asked: dict[str, Any]) -> None:
    server = joined(Server(address="auto", **asked), "0.0.0.0", 9000)
    assert (server.host, server.port, server.address) == ("0.0.0.0", 9000, "auto")


@pytest.mark.parametrize(
    ("asked", "host", "words"),
    [
        ({"port": 8000}, "0.0.0.0", "listens on port 9000 already; give --port 9000"),
        ({"host": "127.0.0.1"}, "0.0.0.0", "listens on host 0.0.0.0 already; give --host 0.0.0.0"),
        ({}, None, "has no HTTP proxy"),
    ],
)
def test_a_running_serve_that_cannot_be_joined_is_refused(
    asked: dict[str, Any], host: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        joined(Server(address="auto", **asked), host, 9000)


@pytest.mark.parametrize("source", ["demo", "/some/model"])
@pytest.mark.parametrize("has_page", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_ready_line_says_what_there_is(source: str, has_page: bool, host: str) -> None:
    from diffray.cluster.serve.server import ready_line

    loading, url = {"model_id": "mine", "model_source": source}, "http://127.0.0.1:8000"
    given = {"model_loading_config": loading, "api": {"page": has_page}}
    application = Application("mine", "/mine", app_config(given))
    line = ready_line(application, Server(host=host), url)
    assert ("(listening on 0.0.0.0)" in line) == (host == "0.0.0.0")
    assert (f"watch it at {url}/mine/\n" in line) == has_page
    assert f"Chat in another terminal: diffray chat --base-url {url}/mine" in line.splitlines()
    prompts = [each.strip() for each in line.splitlines() if each.startswith("  ")]
    assert prompts == (list(examples(source)) if source == "demo" else [])
    assert ("mine is a toy that knows" in line) == (source == "demo")


def test_usage_shows_what_a_newcomer_reads_first() -> None:
    from diffray.cluster.serve.server import ready_line

    walk = (ROOT / "docs/usage.md").read_text().partition("## The first two minutes")[2]
    shown = walk.split("```")[1].strip("\n").splitlines()
    config = app_config({"model_loading_config": {"model_id": "demo"}})
    lines = ready_line(Application("demo", "/", config), Server(), "http://127.0.0.1:8000")
    for line, told in zip(lines.splitlines(), shown, strict=True):
        assert line.startswith(told.removesuffix("...")) and (told.endswith("...") or line == told)


def test_several_models_have_a_line_each_and_those_of_their_door() -> None:
    from diffray.cluster.serve.server import ready_lines

    given = [{"model_loading_config": {"model_id": name}} for name in ("demo", "demo-llada2")]
    lines = ready_lines(applications(given, "test"), Server(), "http://h").splitlines()
    assert lines[:8] == [
        "demo is ready at http://h/demo/v1",
        f"demo {TOY}.",
        "demo-llada2 is ready at http://h/demo-llada2/v1",
        f"demo-llada2 {TOY}.",
        "Prompts to try:",
        *(f"  {prompt}" for prompt in examples("demo")[:3]),
    ]
    assert lines[8].startswith(
        "All models (demo, demo-llada2) are ready at http://h/v1 ; try: curl"
    )
    assert lines[9:] == [
        "Chat with each of them and watch it at http://h/",
        "Chat in another terminal: diffray chat --base-url http://h",
        "The manual of its API is at http://h/docs",
    ]


def test_a_path_of_another_application_is_refused() -> None:
    from diffray.cluster.serve.server import check_paths

    config = app_config({"model_loading_config": {"model_id": "demo"}})
    others = {"demo": {"route_prefix": "/a"}, "other": {"route_prefix": "/b"}}
    found = (Application("demo", "/a", config), Application("new", "/c", config))
    check_paths(Applications(found), others)
    with pytest.raises(ValueError, match="/b is used by application 'other'; give demo another"):
        check_paths(Applications((Application("demo", "/b", config),)), others)
