"""The terminal client says what the endpoint says, as it comes, and survives what goes wrong."""

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffray.cluster.cli.chat import HELP, converse
from diffray.cluster.cli.endpoint import Endpoint, Refused
from diffray.cluster.cli.flags import DIFFUSION
from diffray.components.policy import DiffusionParams
from tests.helpers.fake_endpoint import Answer, Asked, FakeEndpoint, Json, fake_endpoint
from tests.helpers.screen import Screen as Cells

TRIAL = [{"role": "user", "content": "Hello"}]  # of a new policy


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
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "first"}, {"id": "second"}]})
    text = asked.body["messages"][-1]["content"]
    return Answer(chunks=said("you said ", text))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def piped(
    text: str, respond: Callable[[Asked], Answer] = answer, succeeds: bool = True, **options: Any
) -> tuple[str, FakeEndpoint]:
    out = io.StringIO()
    with fake_endpoint(respond) as server:
        endpoint = Endpoint.at(server.url, options.pop("api_key", None))
        assert converse(endpoint, source=io.StringIO(text), out=out, **options) == succeeds
    return out.getvalue(), server


def typed(
    monkeypatch: pytest.MonkeyPatch,
    *lines: str | BaseException,
    respond: Callable[[Asked], Answer] = answer,
    out: io.StringIO | None = None,
    **options: Any,
) -> tuple[str, FakeEndpoint]:
    left = list(lines)

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = left.pop(0) if left else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    out = out or Terminal()
    with fake_endpoint(respond) as server:
        converse(Endpoint.at(server.url), source=Terminal(), out=out, **options)
    assert left == []
    return out.getvalue(), server


class TestPiped:
    def test_each_line_is_a_message_of_one_conversation(self) -> None:
        out, server = piped("one\n\n  two  \n")
        assert out == "you said one\nyou said two\n"
        models, first, second = server.asked
        assert models.path == "/v1/models"
        assert first.path == "/v1/chat/completions"
        messages = [{"role": "user", "content": "one"}]
        assert first.body == {"model": "first", "messages": messages, "stream": True}
        assert [turn["role"] for turn in second.body["messages"]] == ["user", "assistant", "user"]
        assert second.body["messages"][1]["content"] == "you said one"

    def test_commands(self) -> None:
        out, server = piped("/help\none\n/system Shout.\n/clear\ntwo\n/system\nthree\n/exit\nfour")
        assert out.startswith(f"{HELP}\ndecoder   threshold, ")
        assert out.endswith("introspective\nyou said one\nyou said two\nyou said three\n")
        _, _, second, third = (asked.body.get("messages") for asked in server.asked)
        assert [(turn["role"], turn["content"]) for turn in second or []] == [
            ("system", "Shout."), ("user", "two")
        ]  # fmt: skip
        assert [turn["role"] for turn in third or []] == ["user", "assistant", "user"]

    @pytest.mark.parametrize(
        ("refusal", "words"),
        [
            (Answer(400, {"error": {"message": "bad thing"}}), "answers 400: bad thing"),
            (Answer(500, {"detail": "x"}), 'answers 500: {"detail": "x"}'),
            (Answer(chunks=iter([chunk("a"), {"error": {"message": "lost"}}])), "off: lost"),
            (Answer(chunks=iter([chunk("a")])), "broke off"),
            (Answer(chunks=iter(["{"])), "broke off"),
            (Answer(hang_up=True), "connection broke"),
        ],
    )
    def test_refusals_are_one_sentence(
        self, refusal: Answer, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        piped("a", lambda asked: refusal, model="m", succeeds=False)
        said = capsys.readouterr().err
        assert words in said and said.startswith("diffray: ")
        assert said.count("\n") == 1

    def test_an_error_ends_its_line_and_counts(self, capsys: pytest.CaptureFixture[str]) -> None:
        def picky(asked: Asked) -> Answer:
            text = asked.body["messages"][-1]["content"]
            if text == "one":
                return Answer(400, {"error": {"message": "bad thing"}})
            return Answer(chunks=iter([chunk("half")])) if text == "two" else answer(asked)

        out, server = piped("one\n/what\ntwo\nthree\n", picky, model="m", succeeds=False)
        assert out == "half\nyou said three\n"
        told = capsys.readouterr().err.splitlines()
        for line, words in zip(told, ("bad thing", "no command /what", "broke off"), strict=True):
            assert words in line
        last = [turn["content"] for turn in server.asked[-1].body["messages"]]
        assert last == ["two", "half", "three"]

    def test_what_cannot_be_asked_ends_the_chat(self) -> None:
        with pytest.raises(Refused, match="lists no model"):
            piped("a", lambda asked: Answer(body={"data": []}))
        with pytest.raises(ValueError, match="leave n out"):
            piped("a", options={"n": 2})
        nowhere = Endpoint.at("http://127.0.0.1:1")
        with pytest.raises(ConnectionError, match="start a server with `diffray serve`"):
            converse(nowhere, model="m", source=io.StringIO("a"), out=io.StringIO())

    def test_policy_and_seed_hold_from_now_on(self) -> None:
        out, server = piped(
            "one\n/policy decoder=credit decoder.threshold=0.8 cache=none\n/seed 7\ntwo\n"
            "/policy decoder.alpha=1 block_length=16\n/policy\nthree\n/policy decoder=fixed\n"
            "/seed\nfour\n/policy default\n/policy\nfive",
            model="m",
            options={"diffusion": {"decoder": {"kind": "edit"}}, "temperature": 1},
        )
        told = [asked.body for asked in server.asked if asked.body["messages"] != TRIAL]
        tried = [asked.body for asked in server.asked if asked.body["messages"] == TRIAL]
        assert [each["diffusion"] for each in tried] == [each["diffusion"] for each in told[1:4]]
        assert [body.get("seed") for body in told] == [None, 7, 7, None, None]
        credit = {"kind": "credit", "threshold": 0.8}
        none, fixed = {"kind": "none"}, {"kind": "fixed"}
        assert [body.get("diffusion") for body in told] == [
            {"decoder": {"kind": "edit"}},
            {"decoder": credit, "cache": none},
            {"decoder": credit | {"alpha": 1}, "cache": none, "block_length": 16},
            {"decoder": fixed, "cache": none, "block_length": 16},
            None,
        ]
        shown = [line for line in out.splitlines() if not line.startswith("you said")]
        assert shown == [
            "decoder=credit decoder.threshold=0.8 decoder.alpha=1 cache=none block_length=16",
            "the server's default policy",
        ]

    def test_a_wrong_policy_is_refused_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        def picky(asked: Asked) -> Answer:
            if asked.body.get("diffusion") == {"decoder": {"kind": "credi"}}:
                return Answer(400, {"error": {"message": "no kind 'credi'"}})
            return answer(asked)

        lines = "/policy cache=none\n/policy default\n/policy decoder=credi\n/policy\none"
        out, server = piped(lines, picky, model="m", succeeds=False)
        assert capsys.readouterr().err == "diffray: the server answers 400: no kind 'credi'\n"
        assert out == "the server's default policy\nyou said one\n"
        assert "diffusion" not in server.asked[-1].body

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("/polic", "did you mean '/policy'"),
            ("/policy credit", "expected NAME=VALUE"),
            ("/policy temperature=1", "'temperature' is not a part of a policy"),
            ("/policy decoder.threshold=1", "decoder.threshold needs a kind: decoder=KIND"),
            ("/policy decoder=a decoder=b", "twice"),
            ("/policy cfg_scale=1 cfg_scale.b=2", "no options"),
            ("/seed x", "a seed is a whole number (given: 'x')"),
            ("/retry", "nothing was asked yet"),
            ("/save", "needs the name of a file"),
            ("/save x.json", "nothing was said yet"),
        ],
    )
    def test_mistakes_in_commands(
        self, line: str, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        piped(line, model="m", succeeds=False)
        assert words in capsys.readouterr().err

    def test_retry_keeps_the_answer_if_it_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        refusals = [Answer(400, {"error": {"message": "bad day"}})]

        def picky(asked: Asked) -> Answer:
            if asked.body.get("seed"):
                return Answer(400, {"error": {"message": "no seeds"}})
            is_two = asked.body["messages"][-1]["content"] == "two"
            return refusals.pop() if is_two and refusals else answer(asked)

        lines = "one\n/retry\n/seed 1\n/retry\n/seed\ntwo\n/retry\n"
        out, server = piped(lines, picky, model="m", succeeds=False)
        assert out == "you said one\nyou said one\nyou said two\n"
        told = capsys.readouterr().err.splitlines()
        assert [line[-7:] for line in told] == ["o seeds", "bad day"]
        first, again, _, refused, last = (asked.body["messages"] for asked in server.asked)
        assert first == again and refused == last
        assert [turn["content"] for turn in last] == ["one", "you said one", "two"]

    def test_a_saved_chat_is_sent(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "talk.json"
        options = {"seed": 3}
        out, _ = piped(f"one\n/save {file}\n", model="m", options=options, system="Be brief.")
        assert out == "you said one\n"
        saved = json.loads(file.read_text())
        assert (saved["model"], saved["seed"]) == ("m", 3)
        assert [turn["role"] for turn in saved["messages"]] == ["system", "user"]
        piped(f"one\n/save {file}\n/save {tmp_path}/a/b\n", model="m", succeeds=False)
        first, second = capsys.readouterr().err.splitlines()
        assert "exists already; give another name" in first
        assert "cannot be written: No such file" in second


class TestTerminal:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")

    def test_conversation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out, server = typed(monkeypatch, "one", "", KeyboardInterrupt(), "two", EOFError())
        greeting, *rest = out.splitlines()
        assert greeting.startswith(f"first at {server.url}")
        assert rest == ["you said one", "", "you said two", ""]

    def test_greeting_and_policy_are_the_model_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = {"block_length": 32, "decoder": {"kind": "threshold", "threshold": 0.9}}
        about = {"id": "demo", "description": "demo is a toy.", "examples": ["Sort\x1b 3 1.", "b"]}
        listed = Answer(body={"data": [{"id": "other"}, about | {"diffusion": policy}]})
        out, _ = typed(monkeypatch, "/policy", respond=lambda asked: listed, model="demo")
        shown = "block_length=32 decoder=threshold decoder.threshold=0.9"
        told = ["demo is a toy.", "Try:", "  Sort  3 1.", "  b"]
        assert out.splitlines()[1:-1] == [*told, f"the server's default policy {shown}"]

    def test_cut_and_empty_answers_are_marked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = [said("a", finish="length"), said()]

        def short(asked: Asked) -> Answer:
            return Answer(chunks=answers.pop(0)) if asked.body else answer(asked)

        out, _ = typed(monkeypatch, "one", "two", respond=short)
        marks = ["a", "(max_tokens ended the answer)", "", "(empty answer)"]
        assert out.splitlines()[1:-1] == marks

    def test_a_model_need_not_be_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def closed(asked: Asked) -> Answer:
            return answer(asked) if asked.body else Answer(403, {"error": {"message": "no"}})

        out, server = typed(monkeypatch, "one", respond=closed, model="mine")
        assert "you said one" in out and server.asked[-1].body["model"] == "mine"

    def test_ctrl_c_keeps_what_was_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = Terminal()

        def endless(asked: Asked) -> Answer:
            if asked.path == "/v1/models" or len(asked.body["messages"]) > 1:
                return answer(asked)

            def pieces() -> Iterator[Json | str]:
                while "on and on and" not in screen.getvalue():
                    yield chunk("on and ")
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    yield chunk("on and ")

            return Answer(chunks=pieces())

        out, server = typed(monkeypatch, "go", "again", respond=endless, out=screen)
        assert server.hung_up.wait(60)
        assert "(stopped)\nyou said again\n" in out
        go, kept, again = server.asked[-1].body["messages"]
        assert (go["content"], again["content"]) == ("go", "again")
        assert kept["content"].startswith("on and on and ")

    def test_only_files_get_control_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out, _ = typed(monkeypatch, "a\x1b[2J\tb\x9bc")
        assert out.splitlines()[1] == "you said a [2J    b c"
        refusal = Answer(400, {"error": {"message": "no\x1b[2J"}})
        out, _ = typed(monkeypatch, "a", respond=lambda asked: refusal, model="m")
        assert out.splitlines()[1] == "diffray: the server answers 400: no [2J"
        page = Answer(404, {"error": {"message": f"<html>\n{'<p>no model</p>' * 1000}"}})
        out, _ = typed(monkeypatch, "a", respond=lambda asked: page, model="m")
        assert len(out.splitlines()[1]) < 600
        out, _ = piped("a\x1b[2Jb", model="m")
        assert out == "you said a\x1b[2Jb\n"


def steps(*canvases: list[str | None]) -> Iterator[Json | str]:
    for number, tokens in enumerate(canvases):
        about = {"forwards": number + 1, "tokens": tokens}
        yield {"choices": [], "usage": None, "diffusion": about}
    yield chunk("".join(token or "" for token in canvases[-1]))
    yield chunk(finish="stop")
    effort = {"forwards": 2, "tokens_per_forward": 1.5}
    yield {"choices": [], "usage": {"completion_tokens": 3}, "diffusion": effort}
    yield "[DONE]"


def diffray_server(asked: Asked) -> Answer:
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "demo", "owned_by": "diffray"}]})
    if "stream_options" not in asked.body:
        return answer(asked)
    return Answer(chunks=steps(["Hel", None, " you"], ["Hel", "lo", " you"]))


class TestSteps:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")

    def test_every_step_of_a_diffray_server_is_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = Cells()
        _, server = typed(monkeypatch, "one", respond=diffray_server, out=screen, pace=1000)
        (asked,) = (each for each in server.asked if each.body)
        watch = {"include_canvas": True, "include_usage": True}
        assert asked.body["stream_options"] == watch
        states = [screen.text_of(state[1:]).split("\n")[0] for state in screen.states]
        mask = "\N{LIGHT SHADE}"
        order = [f"{mask * 5} {mask * 3}", f"Hel{mask * 2} you", "Hello you"]
        assert [states.index(each) for each in order] == sorted(map(states.index, order))
        assert screen.text.split("\n")[1:3] == [
            "Hello you",
            "(3 tokens, 2 forwards, 1.50 tokens per forward)",
        ]
        assert not screen.is_hidden

    @pytest.mark.parametrize("why", ["other server", "dumb terminal", "no watch"])
    def test_others_get_no_canvas(self, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
        respond = answer if why == "other server" else diffray_server
        if why == "dumb terminal":
            monkeypatch.setenv("TERM", "dumb")
        screen = Cells()
        _, server = typed(
            monkeypatch, "one", respond=respond, out=screen, watch=why != "no watch", pace=1000
        )
        (asked,) = (each for each in server.asked if each.body)
        assert "stream_options" not in asked.body
        assert all("\N{LIGHT SHADE}" not in screen.text_of(state) for state in screen.states)


def test_names_of_diffusion_are_those_of_the_engine() -> None:
    """The command line does not import the engine's model to know them."""
    assert set(DIFFUSION) == set(DiffusionParams.model_fields)
