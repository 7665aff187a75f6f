"""Where a server is said to be is where it is."""

from typing import Any

import pytest

from diffray.cluster.serve.address import Server, joined, reachable_url
from diffray.cluster.serve.app_config import app_config
from diffray.cluster.serve.config_file import Application, Applications
from tests.helpers.paths import ROOT

PROXIES = {"a": {"node_ip": "10.0.0.1"}, "b": {"node_ip": "10.0.0.2"}}


def details(host: str | None, **more: Any) -> dict[str, Any]:
    return {"http_options": {"host": host, "port": 8000}, **more}


def test_a_url_leads_to_a_proxy() -> None:
    for found, here, url in (
        (details("127.0.0.1"), "a", "http://127.0.0.1:8000"),
        (details("::1"), "a", "http://[::1]:8000"),
        (details("0.0.0.0", proxies=PROXIES), "b", "http://10.0.0.2:8000"),
        (details("::", proxies=PROXIES), "c", "http://10.0.0.1:8000"),
        (details("0.0.0.0"), "a", "http://127.0.0.1:8000"),
        (details(None), "a", None),
        ({"applications": {}}, "a", None),
    ):
        assert reachable_url(found, here) == url


def test_a_running_serve_is_joined_where_it_listens_or_not_at_all() -> None:
    rightly: tuple[dict[str, Any], ...] = ({}, {"port": 9000}, {"host": "0.0.0.0"})
    for asked in rightly:
        server = joined(Server(address="auto", **asked), "0.0.0.0", 9000)
        assert (server.host, server.port, server.address) == ("0.0.0.0", 9000, "auto")
    with pytest.raises(ValueError, match="listens on port 9000 already; give --port 9000"):
        joined(Server(address="auto", port=8000), "0.0.0.0", 9000)
    with pytest.raises(ValueError, match=r"on host 0\.0\.0\.0 already; give --host"):
        joined(Server(address="auto", host="127.0.0.1"), "0.0.0.0", 9000)
    with pytest.raises(ValueError, match="has no HTTP proxy"):
        joined(Server(address="auto"), None, 9000)


def test_the_ready_line_names_no_page_or_prompts_that_are_not_there() -> None:
    from diffray.cluster.serve.server import ready_lines

    loading = {"model_id": "mine", "model_source": "/some/model"}
    config = app_config({"model_loading_config": loading, "api": {"page": False}})
    found = Applications((Application("mine", "/mine", config),))
    said = ready_lines(found, Server(host="0.0.0.0"), "http://h")
    assert said.startswith("mine is ready at http://h/mine/v1 (listening on 0.0.0.0)")
    assert "Chat in another terminal: diffray chat --base-url http://h/mine\n" in said
    assert not any(words in said for words in ("watch it", "toy", "Prompts to try", "\n  "))


def test_usage_shows_what_a_newcomer_reads_first() -> None:
    from diffray.cluster.serve.server import ready_lines

    walk = (ROOT / "docs/usage.md").read_text().partition("## The first two minutes")[2]
    shown = walk.split("```")[1].strip("\n").splitlines()
    config = app_config({"model_loading_config": {"model_id": "demo"}})
    found = Applications((Application("demo", "/", config),))
    lines = ready_lines(found, Server(), "http://127.0.0.1:8000")
    for line, told in zip(lines.splitlines(), shown, strict=True):
        assert line.startswith(told.removesuffix("...")) and (told.endswith("...") or line == told)


def test_a_path_of_another_application_is_refused() -> None:
    from diffray.cluster.serve.server import check_paths

    config = app_config({"model_loading_config": {"model_id": "demo"}})
    others = {"demo": {"route_prefix": "/a"}, "other": {"route_prefix": "/b"}}
    found = (Application("demo", "/a", config), Application("new", "/c", config))
    check_paths(Applications(found), others)
    with pytest.raises(ValueError, match="/b is used by application 'other'; give demo another"):
        check_paths(Applications((Application("demo", "/b", config),)), others)
