"""The page at / without a browser: its files, the policy they are sent with, their pure parts."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from diffray.cluster.api import gate
from diffray.cluster.api.http_app import build_api
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from tests.helpers.api_server import serve
from tests.helpers.needed import needed
from tests.helpers.recorder import Recorder

FOLDER = Path(gate.__file__).parent / "page"
UNIT_TESTS = Path(__file__).with_name("page_test.mjs")


@pytest.fixture(scope="module")
def service() -> Service:
    return Service(Recorder(), None, ["some"], examples=["What is <b>1</b> + 1?"])


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx2.Client]:
    with serve(service) as url, httpx2.Client(base_url=url) as http:
        yield http


def test_every_file_is_served_with_its_type(http: httpx2.Client) -> None:
    types = {".html": "html", ".css": "css", ".js": "javascript", ".svg": "svg+xml"}
    assert http.get("/").text == (FOLDER / "index.html").read_text()
    assert http.get("/v1/models").json()["data"][0]["examples"] == ["What is <b>1</b> + 1?"]
    for file in FOLDER.iterdir():
        answer = http.get(f"/page/{file.name}")
        assert answer.content == file.read_bytes()
        assert types[file.suffix] in answer.headers["content-type"]
    for path in ("/page/", "/page/nothing.js", "/page/../page.py", "/page/%2e%2e%2fpage.py"):
        assert http.get(path).status_code == 404


def test_only_its_own_files_may_run_and_load(http: httpx2.Client) -> None:
    for path in ("/", "/page/app.js", "/page/page.css"):
        (policy,) = http.get(path).headers.get_list("content-security-policy")
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert set(rules.values()) == {"'self'", "'none'"}
        assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    markup = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", markup)


def test_the_page_needs_no_key_and_what_it_reads_does(service: Service) -> None:
    with serve(service, ApiSettings(api_keys=("key",))) as url:
        assert httpx2.head(f"{url}/").status_code == 200
        for path in ("/", "/page/app.js", "/openapi.json"):
            assert httpx2.get(url + path).status_code == 200
        for path in ("/v1/models", "/page", "/pages/app.js", "/page/../load"):
            assert httpx2.get(url + path).status_code == 401, path


def test_page_and_manual_can_be_left_out(service: Service) -> None:
    for settings, paths in (
        (ApiSettings(page=False), ("/", "/page/app.js")),
        (ApiSettings(docs=False), ("/docs", "/openapi.json")),
    ):
        with serve(service, settings) as url:
            assert {httpx2.get(url + path).status_code for path in paths} == {404}


@pytest.mark.parametrize(
    ("path", "status", "location"),
    [
        ("/a/b%25c", 307, "b%25c/"), ("/a/b%25c/", 200, None), ("/a/b%25c/nothing", 401, None),
        ("/a/b%25c/health", 200, None), ("/a/b%25c/version/", 401, None),
        ("/a/b%25c/load", 401, None),
    ],
)  # fmt: skip
async def test_below_a_prefix_the_page_ends_in_a_slash_and_the_same_paths_are_open(
    service: Service, path: str, status: int, location: str | None
) -> None:
    app = build_api(lambda: service, ApiSettings(api_keys=("key",)))
    transport = httpx2.ASGITransport(app, root_path="/a/b%c")
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.headers.get("location")) == (status, location)


@pytest.fixture(scope="module")
def openapi(http: httpx2.Client) -> str:
    return http.get("/openapi.json").text


@pytest.mark.slow
def test_the_pure_parts_in_node(openapi: str, tmp_path: Path) -> None:
    needed("node")
    shutil.copytree(FOLDER, tmp_path / "page")
    shutil.copy(UNIT_TESTS, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "openapi.json").write_text(openapi)
    for file in (tmp_path / "page").glob("*.js"):
        subprocess.run(["node", "--check", str(file)], check=True)
    command = ["node", "--test", UNIT_TESTS.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"# pass [1-9]", done.stdout), done.stdout
