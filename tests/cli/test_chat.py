"""The terminal client says what the endpoint says, as it comes, and survives what goes wrong."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import diffray
from diffray.cluster.cli.chat import HELP, chat
from diffray.cluster.cli.endpoint import Endpoint, Refused
from diffray.cluster.cli.flags import Answer as AnswerFlags
from diffray.cluster.cli.flags import Diffusion
from diffray.cluster.cli.request_options import DIFFUSION, request_options
from diffray.components.checkpoints.demos import EXAMPLE
from diffray.components.policy import DiffusionParams
from tests.helpers.fake_endpoint import Answer, Asked, FakeEndpoint, Json, fake_endpoint


def chunk(text: str | None = None, finish: str | None = None) -> Json:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def said(*pieces: str, finish: str = "stop") -> Iterator[Json | str]:
    """Stream as OpenAI does: the role first, usage and [DONE] last."""
    yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    yield from (chunk(piece) for piece in pieces)
    yield chunk(finish=finish)
    yield {"choices": [], "usage": {"completion_tokens": 3}}
    yield "[DONE]"


def answer(asked: Asked) -> Answer:
    """Repeat the last message, in two pieces."""
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "first"}, {"id": "second"}]})
    text = asked.body["messages"][-1]["content"]
    return Answer(chunks=said("you said ", text))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def piped(
    text: str, respond: Callable[[Asked], Answer] = answer, **options: Any
) -> tuple[str, FakeEndpoint]:
    """Chat without a terminal; return what was written, and the server."""
    out = io.StringIO()
    with fake_endpoint(respond) as server:
        endpoint = Endpoint.at(server.url, options.pop("api_key", None))
        chat(endpoint, source=io.StringIO(text), out=out, **options)
    return out.getvalue(), server


def typed(
    monkeypatch: pytest.MonkeyPatch,
    *lines: str | BaseException,
    respond: Callable[[Asked], Answer] = answer,
) -> tuple[str, FakeEndpoint]:
    """Chat as if at a terminal; return what was written, and the server."""
    left = list(lines)

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = left.pop(0) if left else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    out = Terminal()
    with fake_endpoint(respond) as server:
        chat(Endpoint.at(server.url), source=Terminal(), out=out)
    assert left == []
    return out.getvalue(), server


class TestPiped:
    def test_each_line_is_a_message_of_one_conversation(self) -> None:
        out, server = piped("one\n\n  two  \n")
        assert out == "you said one\nyou said two\n"
        models, first, second = server.asked
        assert models.path == "/v1/models"
        assert first.path == "/v1/chat/completions"
        assert first.body == {
            "model": "first",
            "messages": [{"role": "user", "content": "one"}],
            "stream": True,
        }
        assert [turn["role"] for turn in second.body["messages"]] == ["user", "assistant", "user"]
        assert second.body["messages"][1]["content"] == "you said one"

    def test_options_arrive(self) -> None:
        options = {"max_tokens": 7, "diffusion": {"decoder": {"kind": "credit"}}}
        _, server = piped("a", model="mine", options=options, system="Be brief.", api_key="key")
        (asked,) = server.asked
        assert asked.body["model"] == "mine"
        assert asked.body["max_tokens"] == 7
        assert asked.body["diffusion"] == {"decoder": {"kind": "credit"}}
        assert asked.body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert asked.headers["authorization"] == "Bearer key"

    def test_commands(self) -> None:
        out, server = piped("/help\none\n/system Shout.\n/clear\ntwo\n/system\nthree\n/exit\nfour")
        assert out == f"{HELP}\nyou said one\nyou said two\nyou said three\n"
        _, _, second, third = (asked.body.get("messages") for asked in server.asked)
        assert second == [
            {"role": "system", "content": "Shout."},
            {"role": "user", "content": "two"},
        ]
        assert [turn["role"] for turn in third or []] == ["user", "assistant", "user"]

    def test_control_characters_reach_a_file_as_they_are(self) -> None:
        out, _ = piped("a", lambda asked: Answer(chunks=said("x\x1b[2Jy")), model="m")
        assert out == "x\x1b[2Jy\n"

    @pytest.mark.parametrize(
        ("refusal", "words"),
        [
            (Answer(400, {"error": {"message": "bad thing"}}), "answers 400: bad thing"),
            (Answer(401, {"error": "Unauthorized"}), "answers 401: Unauthorized"),
            (Answer(500, {"detail": "x"}), 'answers 500: {"detail": "x"}'),
            (Answer(chunks=iter([chunk("a"), {"error": {"message": "lost"}}])), "off: lost"),
            (Answer(chunks=iter([chunk("a")])), "broke off"),
            (Answer(chunks=iter(["{"])), "broke off"),
            (Answer(hang_up=True), "connection broke"),
        ],
    )
    def test_refusals_are_one_sentence(self, refusal: Answer, words: str) -> None:
        with pytest.raises(Refused) as caught:
            piped("a", lambda asked: refusal, model="m")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_models_must_be_there(self) -> None:
        with pytest.raises(Refused, match="lists no model"):
            piped("a", lambda asked: Answer(body={"data": []}))
        with pytest.raises(Refused, match="403: no"):
            piped("a", lambda asked: Answer(403, {"error": {"message": "no"}}))

    def test_nobody_there(self) -> None:
        with fake_endpoint(answer) as gone:
            pass
        for model in (None, "m"):
            with pytest.raises(ConnectionError, match="start a server with `diffray serve`"):
                chat(Endpoint.at(gone.url), model=model, source=io.StringIO("a"), out=io.StringIO())

    def test_several_answers_are_refused_before_anybody_is_asked(self) -> None:
        with pytest.raises(ValueError, match=r"^a chat shows one answer; leave n out \(given: 2\)"):
            chat(
                Endpoint.at("http://127.0.0.1:1"),
                options={"n": 2},
                source=io.StringIO("a"),
                out=io.StringIO(),
            )
        out, _ = piped("a\n", model="m", options={"n": 1})
        assert out == "you said a\n"

    def test_unknown_command(self) -> None:
        with pytest.raises(Refused, match="/help"):
            piped("/what", model="m")


class TestTerminal:
    def test_conversation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out, server = typed(monkeypatch, "one", "", KeyboardInterrupt(), "two", EOFError())
        greeting, *rest = out.splitlines()
        assert greeting.startswith(f"first at {server.url}")
        assert rest == ["you said one", "", "you said two", ""]

    def test_greeting_says_what_a_demo_model_is_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def demo(asked: Asked) -> Answer:
            assert asked.path == "/v1/models"
            return Answer(body={"data": [{"id": "demo"}]})

        _, toy, example = typed(monkeypatch, respond=demo)[0].strip().splitlines()
        assert "demo is a toy that knows three kinds of questions" in toy
        assert example.strip() == EXAMPLE

    def test_a_refusal_ends_only_its_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def picky(asked: Asked) -> Answer:
            if asked.body.get("messages", [{}])[-1].get("content") == "one":
                return Answer(400, {"error": {"message": "bad thing"}})
            return answer(asked)

        out, server = typed(monkeypatch, "one", "/what", "two", "/exit", respond=picky)
        assert (
            "diffray: the server answers 400: bad thing\ndiffray: there is no command /what" in out
        )
        assert out.endswith("you said two\n")
        assert server.asked[-1].body["messages"] == [{"role": "user", "content": "two"}]

    def test_cut_answers_are_marked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def cut(asked: Asked) -> Answer:
            return Answer(chunks=said("a", finish="length")) if asked.body else answer(asked)

        out, _ = typed(monkeypatch, "one", respond=cut)
        assert "a\n(max_tokens ended the answer)\n" in out

    def test_answers_cannot_move_the_cursor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out, _ = typed(monkeypatch, "a\x1b[2J\tb\x9bc")
        assert out.splitlines()[1] == "you said a [2J\tb c"


PROGRAM = """
import sys
from diffray.cluster.cli.chat import chat
from diffray.cluster.cli.endpoint import Endpoint
chat(Endpoint.at(sys.argv[1]))
print("heavy:", sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    """In a real terminal: what was said before Ctrl-C stays part of the conversation."""
    stop = threading.Event()

    def endless(asked: Asked) -> Answer:
        if asked.path == "/v1/models" or len(asked.body["messages"]) > 1:
            return answer(asked)

        def pieces() -> Iterator[Json | str]:
            while not stop.wait(0.02):
                yield chunk("on and ")

        return Answer(chunks=pieces())

    main, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(diffray.__file__).parents[1]), "TERM": "dumb"}
    with fake_endpoint(endless) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, server.url],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=env,
        )
        os.close(terminal)
        screen = Screen(main)
        screen.wait_for("> ")
        os.write(main, b"go\n")
        screen.wait_for("on and on and ")
        process.send_signal(signal.SIGINT)
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        assert server.hung_up.wait(5)
        os.write(main, b"again\n")
        screen.wait_for("you said again")
        screen.wait_for("> ")
        os.write(main, b"\x04")
        screen.wait_for("heavy: []")
        assert process.wait(10) == 0
        stop.set()
    os.close(main)
    go, kept, again = server.asked[-1].body["messages"]
    assert (go["content"], again["content"]) == ("go", "again")
    assert kept["content"].startswith("on and on and ")


class Screen:
    """What a terminal shows, from the last wait on."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.text = descriptor, ""

    def wait_for(self, text: str) -> None:
        while text not in self.text:
            self.text += os.read(self.descriptor, 4096).decode()
        self.text = self.text[self.text.index(text) + len(text) :]


class TestOptions:
    def test_names_reach_into_parts(self) -> None:
        answer = AnswerFlags(temperature=0, stop=[])
        settings = ["decoder.threshold=0.8", "top_p=1", "user=me"]
        diffusion = Diffusion(decoder="credit", settings=settings)
        assert request_options(answer, diffusion, max_tokens=9) == {
            "temperature": 0,
            "max_tokens": 9,
            "diffusion": {"decoder": {"kind": "credit", "threshold": 0.8}},
            "top_p": 1,
            "user": "me",
        }

    def test_names_of_diffusion_are_those_of_the_engine(self) -> None:
        assert set(DIFFUSION) == set(DiffusionParams.model_fields)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [(["a"], "NAME=VALUE"), (["a=1", "a=2"], "twice"), (["a=1", "a.b=2"], "no options")],
    )
    def test_mistakes(self, settings: list[str], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            request_options(AnswerFlags(), Diffusion(settings=settings))
