"""What a person sees of an answer: every step in its place, then only the text."""

import io
import time
from collections.abc import Generator, Iterator
from itertools import count
from random import Random
from typing import TextIO

import pytest

from diffray.cluster.cli.playback import News, show
from diffray.cluster.frontend.output import Canvas
from tests.helpers.screen import Cell, Screen

MASK = "\N{LIGHT SHADE}"
# Whole words, as a word whose end comes later may have to move to the next row.
WORDS = [
    "The", " quick", " brown", " fox", " jumps.\n\n", "    indented", " \u5b57\u5b57",
    " cafe\u0301", "\tand", " a", " ", "very-" * 20, " end.", " \u5b57" * 5, "<|end|>",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return sized(monkeypatch, 80, 24)


def sized(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> Screen:
    for name, value in (("COLUMNS", columns), ("LINES", lines), ("TERM", "xterm")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen(columns, lines)


def denoised(tokens: list[str], each: int) -> Generator[News, None, None]:
    """Yield the steps of blocks of 16 tokens, some at a time in any order, and the text."""
    random, told = Random(each), ""
    canvas: list[str | None] = [None] * len(tokens)
    for start in range(0, len(tokens), 16):
        order = list(range(start, min(start + 16, len(tokens))))
        random.shuffle(order)
        for at in range(0, len(order), each):
            for position in order[at : at + each]:
                canvas[position] = tokens[position]
            yield [*canvas]
            known = canvas.index(None) if None in canvas else len(canvas)
            text = "".join(tokens[:known]).removesuffix("<|end|>")
            yield text[len(told) :]
            told = text


def played(out: TextIO, *news: News, pace: float = 1000) -> None:
    show((each for each in news), out, pace)


def seen(screen: Screen) -> Iterator[list[list[Cell]]]:
    """Yield every state without the note below the text, which alone may change and vanish."""
    for state in screen.states:
        yield [[] if screen.text_of([row]).startswith("step ") else row for row in state]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 24), (21, 48), (40, 5), (7, 5)])
@pytest.mark.parametrize("each", [1, 2, 3, 100])
def test_nothing_ever_moves_and_the_text_alone_is_left(
    monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, each: int
) -> None:
    screen = sized(monkeypatch, columns, lines)
    show(denoised(WORDS * 3, each), screen, 1000)
    before: list[list[Cell]] = []
    for state in seen(screen):
        for number, row in enumerate(before):
            for column, cell in enumerate(row):
                # What is higher than the screen is at its place only when it is complete.
                if lines > 5 and cell.text.strip() and cell.style != "2":
                    assert state[number][column].text == cell.text
        before = state
    assert not screen.is_hidden
    text = "".join(WORDS * 3).removesuffix("<|end|>")
    assert "".join(screen.text.split()) == "".join(text.split())
    assert {cell.style for row in screen.rows for cell in row} <= {""}


@pytest.mark.parametrize(("no_color", "newest"), [("", "1;32"), ("1", "1")])
def test_newest_tokens_are_coloured_or_bold_and_masks_stand_where_tokens_will(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, no_color: str, newest: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    played(screen, ["two", None, " words"], "two", ["two", " more", " words"], " more words")
    first, second, third = [state[0] for state in seen(screen) if state[0]][:3]
    assert "".join(cell.text for cell in first) == f"{MASK * 3} {MASK * 4} {MASK * 5}"
    assert [cell.style for cell in second] == [newest] * 3 + ["2"] * 5 + [newest] * 6
    assert [cell.style for cell in third] == [""] * 3 + [newest] * 5 + [""] * 6
    assert screen.text == "two more words\n"


def frames(screen: Screen) -> list[str]:
    """Return the first row of each state."""
    return [screen.text_of(state[:1]) for state in seen(screen) if state[0]]


def test_tokens_that_are_replaced_keep_their_places(screen: Screen) -> None:
    played(screen, ["wrong", None, "\n"], ["right", "er ", "x"], "righter x")
    assert frames(screen)[:3] == [f"{MASK * 7} {MASK}", f"wrong{MASK * 2} {MASK}", "righter x"]


def test_drafts_follow_the_text_until_they_are_accepted(screen: Screen) -> None:
    def drafted() -> Generator[News, None, None]:
        yield Canvas(["One", " two", " three", None, None], 2)
        yield "One"
        yield Canvas(["One", " two", " 3", None, None])
        yield " two 3"
        yield Canvas(["One", " two", " 3", " four", "!"], 1)
        yield " four"
        yield ["One", " two", " 3", " four", "."]
        yield "."

    show(drafted(), screen, 1000)
    shown = [screen.text_of(state).split("\n") for state in screen.states if len(state) > 1]
    noted = [tuple(rows) for rows in shown if rows[-1].startswith("step ")]
    assert [*dict.fromkeys(noted)] == [
        ("One two three", "step 1, 4 left"),
        ("One two 3", "step 2, 2 left, 1 of 2 drafts accepted"),
        ("One two 3 four!", "step 3, 1 left"),
        ("One two 3 four.", "step 4, 0 left, 0 of 1 draft accepted"),
    ]
    assert screen.text == "One two 3 four.\n"


def test_drafts_that_no_step_has_verified_are_not_judged(screen: Screen) -> None:
    def drafted() -> Generator[News, None, None]:
        yield Canvas(["One", " a", None, " c", None], 2)
        yield "One"
        yield Canvas(["One", " a", " b", " c", None], 3)
        yield Canvas(["One", " a", " b", None, None])
        yield " a b"

    show(drafted(), screen, 1000)
    shown = [screen.text_of(state) for state in screen.states]
    assert f"One a{MASK} c\nstep 1, 4 left" in shown
    assert not any("step 2" in text and "accepted" in text for text in shown)
    assert "One a b\nstep 3, 2 left, 2 of 3 drafts accepted" in shown


def test_the_last_rows_of_a_high_answer_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = sized(monkeypatch, 40, 5)
    words: list[str | None] = [f"{number}\n" for number in range(9)]
    played(screen, [None, *words[1:]], words, "".join(map(str, words)))
    assert "7\n8\n\nstep 1, 1 left" in map(screen.text_of, screen.states)
    assert screen.text.split() == [*"012345678"]


def test_wide_characters_have_wide_masks(screen: Screen) -> None:
    played(screen, ["a", None], ["a", "\u5b57" * 50], "a" + "\u5b57" * 50)
    assert frames(screen)[0] == MASK + "\N{GETA MARK}" * 39
    assert screen.text == "a" + "\u5b57" * 39 + "\n" + "\u5b57" * 11 + "\n"


def test_characters_of_several_tokens_appear_whole(screen: Screen) -> None:
    part = "\N{REPLACEMENT CHARACTER}"
    played(screen, ["a", part, None, " b"], ["a", part, part, " b"], "a\u5b57 b")
    assert frames(screen)[1:3] == ["a\u5b57 b"] * 2
    assert all(part not in screen.text_of(state) for state in screen.states)


def test_text_is_shown_as_it_is_without_control_characters(screen: Screen) -> None:
    text = "[bold]no[/bold] :smile: 12 \x1b[2J\r\x9b\ttab"
    played(screen, text[:5], text[5:])
    assert screen.text == text.translate({0x1B: " ", 0x0D: " ", 0x9B: " ", 9: "    "}) + "\n"
    assert {cell.style for state in screen.states for row in state for cell in row} == {""}


def test_an_encoding_without_the_mask_has_another(screen: Screen) -> None:
    class Ascii(Screen):
        encoding = "ascii"

    played(screen := Ascii(), [None, "b"], ["a", "b"], "ab")
    assert frames(screen)[0] == "##"


def test_a_step_waits_for_its_place(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    """No place is certain behind a mask, so only the progress is shown."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def late() -> Generator[News, None, None]:
        nonlocal now
        yield [None, " world", None]
        assert screen.states == []
        now = 9.0
        yield ["Hello", " world", None]
        assert screen.text == "\nstep 2, 1 left"
        yield "Hello world"
        yield ["Hello", " world", "ly"]
        assert screen.text == "Hello world\nstep 2, 1 left"
        yield "ly"

    show(late(), screen, 1000)
    assert screen.text.rstrip() == "Hello worldly"


def test_an_interruption_shows_what_was_said_and_the_cursor(screen: Screen) -> None:
    def stopped() -> Generator[News, None, None]:
        yield [None, " words", None]
        yield ["some", " words", None]
        yield "some words"
        yield ["some", " words", "!"]
        assert screen.is_hidden
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show(stopped(), screen, 1000)
    assert screen.text == "some words\n" and not screen.is_hidden


def test_a_note_does_not_outlast_an_answer_without_text(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))

    def stopped() -> Generator[News, None, None]:
        yield [None, None, None]
        yield [None, " a", None]
        assert screen.text.endswith("left")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show(stopped(), screen, 1000)
    assert screen.text.strip() == "" and not screen.is_hidden


@pytest.mark.parametrize("why", ["file", "dumb terminal", "no pace"])
def test_elsewhere_text_comes_as_it_is_said(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setenv("TERM", "dumb" if why == "dumb terminal" else "xterm")
    out = io.StringIO() if why == "file" else Screen()

    def told() -> Generator[News, None, None]:
        yield [None, "wo"]
        yield "some\x1b[2J wo"
        assert said() == "some\x1b[2J wo" if why == "file" else "some [2J wo"
        yield "rds"

    def said() -> str:
        return out.text if isinstance(out, Screen) else out.getvalue()

    show(told(), out, None if why == "no pace" else 1000)
    assert said() == ("some\x1b[2J words\n" if why == "file" else "some [2J words\n")


def test_pauses_are_those_of_the_pace(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    steps = [["a"] * known + [None] * (4 - known) for known in range(1, 5)]
    played(screen, *(news for step in steps for news in (step, "a")), pace=4)
    assert slept == [0, 0.25, 0.25, 0.25, 0.25]
    with pytest.raises(ValueError, match=r"--pace must be at least 1 step per second \(given: 0\)"):
        played(screen, pace=0)
