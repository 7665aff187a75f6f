"""A batch answers every line once, whatever happens on the way, and says what it could not do."""

import asyncio
import io
import json
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.api.batch_lines import Answer, Reply, pause
from diffray.cluster.cli.batch import endpoint_answers, engine_answers
from diffray.cluster.cli.batch_run import Progress, Summary, run_batch
from diffray.cluster.cli.endpoint import Endpoint
from diffray.cluster.cli.main import app
from diffray.cluster.control.engine_config import EngineConfig
from tests.helpers.fake_endpoint import Answer as HttpAnswer
from tests.helpers.fake_endpoint import Asked, fake_endpoint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the answers by their ids, of which there is one each."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    for line in lines:
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert (line["response"] is None) != (line["error"] is None)
    return found


def echo(asked: Asked) -> HttpAnswer:
    said = {"id": "chatcmpl-1", "said": asked.body["say"], "usage": {"completion_tokens": 2}}
    return HttpAnswer(body=said)


def picky(asked: Asked) -> HttpAnswer:
    if asked.body["say"] == 1:
        return HttpAnswer(400, {"error": {"message": "no"}}, {"X-Request-Id": "req-7"})
    return echo(asked)


def through(url: str, key: str | None = None, timeout: float = 10, model: str | None = None) -> Any:
    endpoint = Endpoint.at(url, key)
    return endpoint_answers(endpoint, model=model, timeout=timeout, first_pause=0.01)


class TestEndpoint:
    def test_every_line_is_answered(self, tmp_path: Path) -> None:
        urls = CHAT, COMPLETIONS
        lines = [request(f"r{n}", urls[n % 2], say=n, model="other") for n in range(20)]
        source, target = write(tmp_path / "in", *lines, "", "  "), tmp_path / "out"
        with fake_endpoint(echo) as server:
            backend = through(server.url + "/llada/v1/", "key", model="mine")
            summary = run_batch(source, target, backend, concurrency=4)
        answers = read(target)
        assert {name: line["response"]["body"]["said"] for name, line in answers.items()} == {
            f"r{n}": n for n in range(20)
        }
        assert answers["r3"]["response"]["status_code"] == 200
        assert answers["r3"]["response"]["request_id"] == "chatcmpl-1"
        assert {asked.path for asked in server.asked} == {"/llada" + CHAT, "/llada" + COMPLETIONS}
        assert {asked.body["model"] for asked in server.asked} == {"mine"}, "the one that is given"
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer key"}
        assert (summary.answered, summary.failed, summary.tokens, summary.left) == (20, 0, 40, 0)
        assert "20 requests: 20 answered, 0 failed; 40 tokens" in str(summary)

    def test_no_more_at_once_than_allowed(self, tmp_path: Path) -> None:
        most, open_now = 0, list[int]()
        together = threading.Barrier(3)

        def slow(asked: Asked) -> HttpAnswer:
            nonlocal most
            open_now.append(1)
            most = max(most, len(open_now))
            together.wait(60)
            open_now.pop()
            return echo(asked)

        source = write(tmp_path / "in", *(request(f"r{n}", say=n) for n in range(12)))
        with fake_endpoint(slow) as server:
            run_batch(source, tmp_path / "out", through(server.url), concurrency=3)
        assert most == 3

    @pytest.mark.parametrize("frees", [True, False])
    def test_busy_servers_are_asked_again_when_they_say(self, tmp_path: Path, frees: bool) -> None:
        times: list[float] = []

        def busy(asked: Asked) -> HttpAnswer:
            times.append(time.monotonic())
            if len(times) > 4 and frees:
                return echo(asked)
            status = [503, 429, 502, 504][len(times) % 4]
            return HttpAnswer(status, {"error": {"message": "full"}}, {"Retry-After": "0.1"})

        source, target = write(tmp_path / "in", request("a", say=1)), tmp_path / "out"
        with fake_endpoint(busy) as server:
            summary = run_batch(source, target, through(server.url), tries=8)
        assert all(after - before >= 0.1 for before, after in pairwise(times))
        response = read(target)["a"]["response"]
        if frees:
            assert (summary.answered, response["status_code"]) == (1, 200)
        else:  # the last answer
            assert (summary.failed, response["body"]) == (1, {"error": {"message": "full"}})
        assert len(times) == (5 if frees else 8)
        assert summary.seconds < 60  # as the server says; untold, the pauses are 1, 2, ... 64 s

    def test_what_goes_wrong_fails_one_line_each(self, tmp_path: Path) -> None:
        over = threading.Event()

        def broken(asked: Asked) -> HttpAnswer:
            if asked.body["say"] == 2:
                return HttpAnswer(hang_up=True)
            if asked.body["say"] == 3:
                over.wait(60)
            return picky(asked)

        source = write(tmp_path / "in", *(request(f"r{n}", say=n) for n in range(5)))
        with fake_endpoint(broken) as server:
            summary = run_batch(source, tmp_path / "out", through(server.url, timeout=2))
            over.set()
        answers = read(tmp_path / "out")
        assert (summary.answered, summary.failed) == (2, 3)
        refusal = {"error": {"message": "no"}}
        expected = {"status_code": 400, "request_id": "req-7", "body": refusal}
        assert answers["r1"]["response"] == expected
        assert answers["r2"]["error"]["code"] == "connection_error"
        assert answers["r3"]["error"] == {"code": "timeout", "message": "no answer within 2 s"}

    def test_a_server_that_is_gone_or_refuses_the_key_ends_it(self, tmp_path: Path) -> None:
        lines = (request(f"r{n}", say=n) for n in range(9))
        source, target = write(tmp_path / "in", *lines), tmp_path / "out"
        denied = HttpAnswer(401, {"error": {"message": "Incorrect API key."}})
        with fake_endpoint(lambda asked: denied) as server:
            with pytest.raises(ConnectionError, match="401: Incorrect API key"):
                run_batch(source, target, through(server.url), concurrency=1)
            assert len(server.asked) == 1
        with pytest.raises(ConnectionError, match=r"nothing answers at http://127\.0"):
            run_batch(source, target, through(server.url))
        assert target.read_text() == ""
        for address in ("localhost:8000", "http://", "ftp://a", "http://a/?b", "http://a:b"):
            with pytest.raises(ValueError, match=r"expected a URL|leave out"):
                Endpoint.at(address)


@asynccontextmanager
async def nobody() -> AsyncGenerator[Answer, None]:
    raise AssertionError("a request was sent")
    yield


@asynccontextmanager
async def always(reply: Reply) -> AsyncGenerator[Answer, None]:
    async def answer(url: str, body: dict[str, Any]) -> Reply:
        await asyncio.sleep(0)
        return reply

    yield answer


class TestFiles:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("{", ("not valid JSON",)),
            ("[]", ("expected an object",)),
            ({}, ("custom_id", "required")),
            (request("a", "/v1/embeddings"), ("url", "'/v1/embeddings'", CHAT)),
            (request("b") | {"method": "GET"}, ("method", "POST")),
            (request("b") | {"model": "x"}, ("'model'",)),
            (request("b", stream=True), ("body.stream",)),
            (request("first"), ("'first'", "already used in line 1")),
        ],
    )
    def test_wrong_lines_are_named_before_anything_is_sent(
        self, tmp_path: Path, line: dict[str, Any] | str, words: tuple[str, ...]
    ) -> None:
        source = write(tmp_path / "in", request("first"), "", line)
        with pytest.raises(ValueError) as caught:
            run_batch(source, tmp_path / "out", nobody())
        said = str(caught.value)
        for word in (str(source), "line 3: ", *words):
            assert word in said
        assert not (tmp_path / "out").exists()

    def test_files_that_cannot_be(self, tmp_path: Path) -> None:
        empty = write(tmp_path / "empty")
        with pytest.raises(ValueError, match="has no requests"):
            run_batch(empty, tmp_path / "out", nobody())
        for missing in (tmp_path / "none", tmp_path):
            with pytest.raises(ValueError, match=f"no such file: {missing}; give one with"):
                run_batch(missing, tmp_path / "out", nobody())
        source = write(tmp_path / "in", request("a"))
        with pytest.raises(ValueError, match="is the input"):
            run_batch(source, source, nobody())
        with pytest.raises(ValueError, match="line 1 is not an answer"):
            run_batch(source, write(tmp_path / "text", "{}"), nobody())
        with pytest.raises(ValueError, match="concurrency"):
            run_batch(source, tmp_path / "out", nobody(), concurrency=0)
        ranks = engine_answers("demo", EngineConfig(tensor_parallel_size=2))
        with pytest.raises(ValueError, match="tensor_parallel_size"):
            run_batch(source, tmp_path / "out", ranks)

    def test_it_can_be_continued(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        source = write(tmp_path / "in", *(request(f"r{n}") for n in range(4)))
        target = tmp_path / "out"
        run_batch(source, target, always(Reply(200, "x", {})))
        first, second, *_ = target.read_text().splitlines(keepends=True)
        target.write_text(first + second[:-7])
        with caplog.at_level(logging.WARNING):
            summary = run_batch(source, target, always(Reply(200, "y", {})))
        assert "incomplete" in caplog.text
        assert (summary.before, summary.answered) == (1, 3)
        assert "1 done before" in str(summary)
        names = {name: line["response"]["request_id"] for name, line in read(target).items()}
        assert sorted(names) == ["r0", "r1", "r2", "r3"]
        assert sorted(names.values()) == ["x", "y", "y", "y"]
        assert run_batch(source, target, nobody()).before == 4

    def test_a_failed_request_ends_every_run_with_1(self, tmp_path: Path) -> None:

        source = write(tmp_path / "in", *(request(f"r{n}", say=n) for n in range(3)))
        target = tmp_path / "out"
        with fake_endpoint(picky) as server:
            command = ["batch", str(source), str(target), "--base-url", server.url]
            for count in ("2 answered, 1 failed", "0 answered, 0 failed, 3 done before"):
                result = CliRunner().invoke(app, command)
                assert result.exit_code == 1
                summary, error = result.stderr.splitlines()
                assert count in summary
                assert error.startswith(f"diffray: 1 of 3 requests failed; {target} says why")
            assert len(read(target)) == 3
            answered = [each for each in target.read_text().splitlines() if '"no"' not in each]
            target.write_text("\n".join([*answered, ""]))
            write(source, *(request(f"r{n}", say=0) for n in range(3)))
            assert CliRunner().invoke(app, command).exit_code == 0

    def test_pauses_double_unless_told(self) -> None:
        assert [pause(n, None) for n in (0, 1, 5, 9)] == [1, 2, 32, 60]
        assert (pause(3, 0.5), pause(0, 900.0)) == (0.5, 60)


def test_progress_is_logged() -> None:
    file, summary = io.StringIO(), Summary(4, before=1)
    Progress(summary, file).count(Reply(200, "id", {}))
    assert file.getvalue() == "", "quick batches say nothing"
    Progress(summary, file, log_seconds=0).count(None)
    assert file.getvalue() == "3 of 4 done, 1 failed\n"


def test_loading_does_not_count(tmp_path: Path) -> None:
    @asynccontextmanager
    async def loaded() -> AsyncGenerator[Answer, None]:
        async def answer(url: str, body: dict[str, Any]) -> Reply:
            return Reply(200, "id", {})

        await asyncio.sleep(1)
        yield answer

    begin = time.monotonic()
    summary = run_batch(write(tmp_path / "in", request("a")), tmp_path / "out", loaded())
    assert summary.answered == 1 and 0 < summary.seconds < time.monotonic() - begin - 0.9


def test_ctrl_c_keeps_what_is_there(tmp_path: Path) -> None:
    over = threading.Event()

    def stuck(asked: Asked) -> HttpAnswer:
        if asked.body["say"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(120)
        return echo(asked)

    source = write(tmp_path / "in", *(request(f"r{n}", say=n) for n in range(4)))
    with fake_endpoint(stuck) as server:
        summary = run_batch(source, tmp_path / "out", through(server.url), concurrency=1)
        over.set()
    assert summary.interrupted and " tokens/s" in str(summary)
    assert str(summary).startswith("4 requests: 2 answered, 0 failed, 2 left")
    assert sorted(read(tmp_path / "out")) == ["r0", "r1"]


@pytest.mark.slow
class TestOwnEngine:
    def test_answers_are_the_engines(self, tmp_path: Path) -> None:
        question = [{"role": "user", "content": "Tom buys 3 pens for 4 dollars each. How much?"}]
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
        source = write(
            tmp_path / "in",
            request("chat", messages=question, **options),
            request("text", COMPLETIONS, model="demo", prompt="Tom", **options),
            request("other", model="gpt-9", messages=question),
            request("long", COMPLETIONS, prompt="Tom", max_tokens=10**6),
        )
        config = EngineConfig(device="cpu", dtype="float64")
        summary = run_batch(source, tmp_path / "out", engine_answers("demo", config))
        assert (summary.answered, summary.failed) == (2, 2)
        answers = {name: line["response"] for name, line in read(tmp_path / "out").items()}
        llm, params = DiffusionLLM("demo", device="cpu", dtype="float64"), SamplingParams(**options)
        (chat,) = llm.chat(question, params)
        (text,) = llm.generate("Tom", params)
        choice = answers["chat"]["body"]["choices"][0]
        assert choice["message"]["content"] == chat.outputs[0].text
        assert answers["text"]["body"]["choices"][0]["text"] == text.outputs[0].text
        assert answers["chat"]["request_id"] == answers["chat"]["body"]["id"]
        assert summary.tokens == chat.completion_tokens + text.completion_tokens
        assert answers["other"]["status_code"] == 404
        assert "context length" in answers["long"]["body"]["error"]["message"]
