"""What a person sees of an answer: text in its place at once, word by word, never moved."""

import io
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import TextIO

import pytest

from diffray.cluster.cli.playback import Playback
from diffray.cluster.cli.rows import owners, rows, wrapped
from tests.helpers.screen import Cell, Screen

MASK = "\N{LIGHT SHADE}"
WORDS = [
    "The", " quick", " brown", " f", "ox", " jumps", ".\n\n", "    in", "dented", " \u5b57\u5b57",
]  # fmt: skip
WORDS += [" cafe\u0301", "\tand", " a", "-very-" * 20, " end", ".", "<|end|>"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return sized(monkeypatch, 80, 24)


def sized(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> Screen:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen(columns, lines)


def played(screen: Screen, tokens: Sequence[str], *, block: int, each: int) -> str:
    random = Random(each)
    canvas: list[str | None] = [None] * len(tokens)
    told = ""
    with Playback(screen, pace=1000) as shown:
        for start in range(0, len(tokens), block):
            order = list(range(start, min(start + block, len(tokens))))
            random.shuffle(order)
            for at in range(0, len(order), each):
                for position in order[at : at + each]:
                    canvas[position] = tokens[position]
                shown.step(list(canvas))
                known = canvas.index(None) if None in canvas else len(canvas)
                text = "".join(tokens[:known]).removesuffix("<|end|>")
                shown.say(text[len(told) :])
                told = text
        shown.finish()
    return told


def show(out: TextIO, text: str, *canvases: list[str | None]) -> None:
    with Playback(out, pace=1000) as shown:
        for canvas in canvases:
            shown.step(canvas)
        shown.say(text)
        shown.finish()


def seen(screen: Screen) -> Iterator[list[list[Cell]]]:
    """Yield every state without the note below the text, which alone may change and vanish."""
    for state in screen.states:
        notes = [row for row in state if row and row[0].style == "2" and row[0].text == "s"]
        assert len(notes) <= 1
        yield [[] if row in notes else row for row in state]


@pytest.mark.parametrize("columns", [80, 40, 20, 7])
@pytest.mark.parametrize("lines", [24, 5])
@pytest.mark.parametrize("each", [1, 2, 3, 100])
def test_nothing_that_is_shown_ever_moves_or_vanishes_and_the_text_alone_is_left(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, each: int
) -> None:
    screen = sized(monkeypatch, columns, lines)
    text = played(screen, WORDS * 3, block=16 if lines == 24 else 60, each=each)
    before: list[list[Cell]] = []
    for state in seen(screen):
        for number, row in enumerate(before):
            for column, cell in enumerate(row):
                if cell.text.strip() and MASK not in cell.text:
                    assert state[number][column].text == cell.text
        before = state
    assert not screen.is_hidden
    assert "".join(screen.text.split()) == "".join(text.split())
    assert {cell.style for row in screen.rows for cell in row} <= {""}
    expected = [line.rstrip() for line in wrapped(text)]
    assert columns <= 20 or screen.text.rstrip("\n").split("\n") == expected


@pytest.mark.parametrize(("no_color", "newest"), [("", "1;32"), ("1", "1")])
def test_newest_tokens_are_coloured_or_bold_and_masks_stand_where_tokens_will(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, no_color: str, newest: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    canvases: list[list[str | None]] = [["two", None, " words"], ["two", " more", " words"]]
    show(screen, "two more words ", *canvases)
    first, second, third = (state[0] for state in [*seen(screen)][:3])
    assert "".join(cell.text for cell in first) == MASK * 14 + " "
    assert [cell.style for cell in second[:14]] == [newest] * 3 + ["2"] * 5 + [newest] * 6
    assert [cell.style for cell in third[:14]] == [""] * 3 + [newest] * 5 + [""] * 6
    assert screen.text == "two more words\n"
    assert {cell.style for row in screen.rows for cell in row} == {""}


def test_tokens_that_are_replaced_keep_their_places(screen: Screen) -> None:
    show(screen, "righter ", ["wrong", None], ["right", "er "])
    texts = ["".join(cell.text for cell in state[0]).rstrip() for state in seen(screen)]
    assert texts[:3] == [MASK * 8, "wrong" + MASK * 3, "righter"]


def test_characters_of_several_tokens_appear_whole(screen: Screen) -> None:
    part = "\N{REPLACEMENT CHARACTER}"
    show(screen, "a\u5b57 b", ["a", part, None, " b"], ["a", part, part, " b"])
    assert all(part not in screen.text_of(state) for state in screen.states)
    assert screen.text == "a\u5b57 b\n"
    assert owners(["a", part, part, "b"], "a\u5b57b") == [0, 3, 3]
    assert owners(["a", "<|end|>", "b"], "ab") == [0, 2]


def test_a_terminal_without_the_sign_has_another() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(out, "ab", [None, "b"], ["a", "b"])
    out.seek(0)
    assert "#" in out.read()


def test_a_step_waits_for_its_place(screen: Screen) -> None:
    """No place is certain behind a mask, so nothing is shown."""
    with Playback(screen, pace=1000) as shown:
        shown.step([None, " world", None])
        shown.step(["Hello", " world", None])
        shown.say("Hello world")
        assert screen.states == []
        shown.step(["Hello", " world", None])
        assert screen.text.startswith("Hello")
        assert "world" not in screen.text  # the word may go on
        shown.step(["Hello", " world", "ly"])
        shown.say("ly")
        shown.finish()
    assert screen.text == "Hello worldly\n"


def test_a_long_wait_is_explained(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Playback(screen, pace=1000) as shown:
        shown.step([None, "b", None])
        assert screen.text == ""
        now = 9.0
        shown.step([None, "b", "c"])
        assert screen.text == "\nstep 2, 1 masked"
        shown.step(["a", "b", "c"])
        shown.say("abc")
        shown.finish()
    assert screen.text.rstrip() == "abc"


def test_an_interruption_shows_what_was_said_and_the_cursor(screen: Screen) -> None:
    with pytest.raises(KeyboardInterrupt), Playback(screen, pace=1000) as shown:
        shown.step(["some", " words"])
        shown.say("some words")
        raise KeyboardInterrupt
    assert screen.text == "some words\n" and not screen.is_hidden


def test_without_steps_words_come_as_they_are_said_and_the_cursor_stays() -> None:
    out = io.StringIO()
    with Playback(out, pace=1000) as shown:
        shown.say("some wo")
        assert out.getvalue() == "some "
        shown.say("rds " + "x " * 60)
        shown.finish()
    assert "\x1b" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_pauses_are_those_of_the_pace(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    with Playback(screen, pace=4) as shown:
        for known in range(1, 5):
            shown.step(["a"] * known + [None] * (4 - known))
        shown.say("aaaa ")
        shown.finish()
    assert slept[1:] == [0.25] * 5
    with pytest.raises(ValueError, match=r"--pace must be at least 1 step per second \(given: 0\)"):
        Playback(screen, pace=0)


@pytest.mark.parametrize(
    ("text", "width", "column", "expected"),
    [
        ("one two three", 8, 0, ["one two ", "three"]),
        ("one two", 20, 18, ["", "one two"]),
        ("a\n  b c", 4, 0, ["a", "  b ", "c"]),
        ("abcdefgh", 3, 0, ["abc", "def", "gh"]),
        ("ab      cd", 4, 0, ["ab      ", "cd"]),
        ("\u5b57\u5b57\u5b57", 5, 0, ["\u5b57\u5b57", "\u5b57"]),
        ("\n", 5, 3, ["", ""]),
        ("", 5, 0, [""]),
    ],
)
def test_rows_break_at_words(text: str, width: int, column: int, expected: list[str]) -> None:
    assert [text[start:stop] for start, stop in rows(text, width, column)] == expected
