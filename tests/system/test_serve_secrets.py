"""What others can see of `diffray serve`: no key, no prompt, and only what is meant to listen."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tools.serve_process import ServeProcess, serve_process

pytestmark = pytest.mark.long

KEYS = ("key-on-the-command-line-7731", "key-in-the-environment-7732")
OPERATORS = ("operator-on-the-command-line-7735", "operator-in-the-environment-7736")
PROMPT = "xylophone-7733"
ASK = {"prompt": PROMPT, "max_tokens": 4}


@pytest.fixture(scope="module")
def running() -> Iterator[ServeProcess]:
    keys = ("--api-key", KEYS[0], "--operator-key", OPERATORS[0])
    arguments = ("demo", "--device", "cpu", "--dashboard", *keys)
    settings = {"DIFFRAY_API_KEY": KEYS[1], "DIFFRAY_OPERATOR_KEY": OPERATORS[1]}
    with serve_process(*arguments, settings=settings) as running:
        running.wait_for("is ready", 1)
        yield running


def test_keys_and_prompts_are_nowhere_to_be_read(running: ServeProcess) -> None:
    url = f"{running.url}/v1/completions"
    for key in KEYS:
        right = {"Authorization": f"Bearer {key}"}
        assert httpx2.post(url, json=ASK, headers=right, timeout=120).status_code == 200
    for key in OPERATORS:
        operator = {"Authorization": f"Bearer {key}"}
        asked = httpx2.post(f"{running.url}/update_weights_from_disk", json={}, headers=operator)
        assert asked.status_code == 400 and "model_path" in asked.text
    wrong = {"Authorization": "Bearer no-key-7734"}
    stream = httpx2.post(url, json=ASK | {"stream": True}, headers=right, timeout=120)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert httpx2.post(url, json=ASK | {"top_p": PROMPT}, headers=right).status_code == 400
    for headers in (wrong, {}):
        assert httpx2.post(url, json=ASK, headers=headers).status_code == 401

    words = [word.encode() for word in (*KEYS, *OPERATORS, PROMPT, "no-key-7734")]
    for pid, line in running.processes().items():
        seen = line.encode() + Path(f"/proc/{pid}/environ").read_bytes()
        assert not any(word in seen for word in words), line
    told = [running.said.encode(), *dashboard(running)]
    told += [file.read_bytes() for file in running.folder.rglob("*") if file.is_file()]
    for text in told:
        for word in words:
            assert word not in text, text[max(text.index(word) - 200, 0) :][:400]


def test_rays_token_and_files_are_this_users_alone(running: ServeProcess) -> None:
    """The files by their place: Ray lets everybody write to its session's folder."""
    token, home = running.folder / ".ray/auth_token", running.folder
    assert [path.stat().st_mode & 0o077 for path in (token, home)] == [0, 0]
    assert len(list((home / "ray").glob("session_2*"))) == 1


def dashboard(running: ServeProcess) -> Iterator[bytes]:
    """Yield what Ray's dashboard, which is where it is said to be, knows of jobs and actors."""
    token = (running.folder / ".ray/auth_token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}

    found = re.search(r"; dashboard at (http://\S+)\n", running.said)
    assert found, running.said

    def ask(path: str) -> httpx2.Response:
        return httpx2.get(f"{found[1]}/api/{path}", headers=headers, timeout=60)

    assert "diffray serve" in ask("jobs/").text
    for path in ("jobs/", "serve/applications/", "v0/jobs", "v0/actors?detail=1"):
        answer = ask(path)
        assert answer.status_code == 200, answer.text
        yield answer.content


def test_what_speaks_http_listens_on_this_machine_alone(running: ServeProcess) -> None:
    """A replica's gRPC port alone is reached from elsewhere, and asks for Ray's token."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    outside = {(host, port) for host, port in running.listening() if host != "127.0.0.1"}
    assert [host for host, _ in outside] == ["::"]
    assert ("127.0.0.1", running.port) in running.listening()
    for _, port in outside:
        for path in ("/health", "/v1/models", "/-/routes", "/stats", "/api/version"):
            with pytest.raises(httpx2.HTTPError):
                httpx2.get(f"http://[::1]:{port}{path}", headers=headers, timeout=5)
    # What Serve says to all, keys or not.
    assert httpx2.get(f"{running.url}/-/healthz").status_code == 200
    for path in ("/-/routes", "/-/Routes", "/%2d/routes", "/-%2Froutes"):
        assert httpx2.get(f"{running.url}{path}").status_code in (401, 404), path
