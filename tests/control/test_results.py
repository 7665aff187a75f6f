"""How results show themselves: in a terminal, in a notebook, as text."""

import pickle
import sys
from base64 import b64decode
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest

from diffray import CompletionOutput, RequestOutput
from diffray.cluster.frontend.views import frame, picture
from tests.helpers.byte_tokenizer import TOKENIZER


def test_tokens_are_the_text_in_pieces() -> None:
    text = "na\u00efve \u65e5\u672c <|end|>!"
    ids = TOKENIZER.encode(text)
    tokens = TOKENIZER.tokens(ids)
    assert "".join(tokens) == text and len(tokens) == len(ids)
    assert tokens[2:4] == ["", "\u00ef"] and "\ufffd" not in "".join(tokens)
    assert "".join(TOKENIZER.tokens([0xE6, 65])) != "", "half a character"


ANSWER = CompletionOutput(
    0,
    text="The <b>answer</b>\nis 22.",
    token_ids=[5, 6, 7, 8, 9],
    tokens=["The", " <b>answer</b>\n", "is", " 22.", "<|end|>"],
    steps=[0, 2, 1, 2, 2],
    finish_reason="stop",
    stop_reason=9,
    forwards=3,
)
SUMMARY = "5 tokens in 3 forwards, 1.7 tokens per forward, stop"
OUTPUT = RequestOutput("Why & <how>?", [1, 2], [ANSWER])


def test_results_may_be_printed_pickled_and_made_dicts() -> None:
    assert repr(OUTPUT) == (
        "RequestOutput(prompt='Why & <how>?', outputs=[CompletionOutput(index=0, "
        "text='The <b>answer</b>\\nis 22.', 5 tokens, 3 forwards, finish_reason='stop')])"
    )
    long = CompletionOutput(0, text="word " * 9999, token_ids=[1] * 9999)
    assert len(repr(RequestOutput("ask " * 9999, [1], [long]))) < 400
    assert ANSWER.visible == list(zip(ANSWER.tokens, ANSWER.steps, strict=True))[:-1]
    assert pickle.loads(pickle.dumps(OUTPUT)) == OUTPUT
    assert asdict(OUTPUT)["outputs"][0]["steps"] == ANSWER.steps


def images(html: str) -> list[str]:
    """Return the pictures in a page, which must be well-formed and load nothing."""
    root = ElementTree.fromstring(html.replace('700px">', '700px"/>'))
    assert {each.tag for each in root.iter()} <= {"div", "img", "pre", "p", "small"}
    drawn = []
    for image in root.iter("img"):
        kind, _, data = image.attrib["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawn.append(b64decode(data).decode())
    return drawn


def test_a_notebook_shows_the_denoising_without_scripts_or_links() -> None:
    html = OUTPUT._repr_html_()
    (svg,) = images(html)
    assert "The &lt;b&gt;answer&lt;/b&gt;\nis 22." in html
    assert SUMMARY in html
    for word in ("script", "href", "url(", "@import", "foreignObject", " on"):
        assert word not in svg, word
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(svg)
    said = "".join(str(each.text) for each in root.iter() if each.tag.endswith("}desc"))
    assert said == "Question: Why & <how>? Answer: The <b>answer</b>\nis 22."
    notes = [each.text for each in root.iter() if "note n" in each.get("class", "")]
    assert notes == [f"step {n} of 3: {left} masks left" for n, left in enumerate((4, 3, 2, 0))]
    masks = [each.get("class") for each in root.iter() if each.tag.endswith("}rect")]
    assert masks == ["card", "mask m1", "mask m3", "mask m2", "mask m3"]


def test_a_picture_wraps_words_and_breaks_long_ones_and_survives_any_text() -> None:
    texts = ["x" * 150, " wide \u65e5\u672c", "\x00\x1b[0m\ud800\ufffe]]>", "\n", "\n end"]
    choice = CompletionOutput(0, "t", [1] * 5, tokens=texts, steps=[4, 3, 2, 1, 0], forwards=5)
    (svg,) = images(RequestOutput(None, [1], [choice])._repr_html_())
    root = ElementTree.fromstring(svg)
    width = float(root.attrib["viewBox"].split()[2])
    boxes = [each.attrib for each in root.iter() if "mask" in each.get("class", "")]
    assert len(boxes) >= 6
    assert all(float(box["x"]) + float(box["width"]) < width for box in boxes)
    assert len({box["y"] for box in boxes}) >= 4
    assert "Question" not in svg


def test_a_picture_shows_drafts_where_they_stood_until_the_next_step() -> None:
    svg = picture("Ask", [("One", 0), (" two", 1), (" 3", 1)], [(" two", 0, 1), (" <3>", 0, 2)])
    root = ElementTree.fromstring(svg)
    texts = {
        str(each.text): each.attrib for each in root.iter() if "draft" in each.get("class", "")
    }
    assert {text: own["class"] for text, own in texts.items()} == {
        "two": "draft n1",
        "<3>": "draft n1",
    }
    places = {each.text: each.get("x") for each in root.iter() if each.get("class") == "t2"}
    assert [texts["two"]["x"], texts["<3>"]["x"]] == [places["two"], places["3"]]
    assert "step 1 of 2: 2 tokens left" in svg and "verifies" in svg
    assert "draft n" not in picture("Ask", [("One", 0)])


def test_large_outputs_stay_small_in_a_notebook() -> None:
    size = 600
    many = CompletionOutput(0, "t", [1] * size, tokens=["t"] * size, steps=[*range(size)])
    assert images(RequestOutput("p", [1], [many])._repr_html_()) == []
    some = CompletionOutput(0, "t", [1] * 512, tokens=["t"] * 512, steps=[*range(512)])
    outputs = RequestOutput("p", [1], [some] * 9)
    assert len(images(outputs._repr_html_())) == 4
    assert len(outputs._repr_html_()) < 2_500_000


def test_a_pace_is_above_zero() -> None:
    with pytest.raises(ValueError, match=r"pace is the steps per second, above 0 \(given: 0\)"):
        OUTPUT.show(pace=0)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_show_plays_every_step_in_a_terminal_and_prints_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    OUTPUT.show(pace=1000)
    shown, printed = capsys.readouterr().out, f"{ANSWER.text}\n{SUMMARY}\n"
    assert shown.endswith(printed) if is_terminal else shown == printed
    for step, masked in ((1, 3), (2, 2), (3, 0)):
        assert (f"step {step}, {masked} masked of 4" in shown) == is_terminal
    middle = frame(ANSWER.visible, 1)
    hidden = "\N{LIGHT SHADE}"
    assert middle.plain.splitlines()[1] == f"The{hidden * 15}is{hidden * 4}"
    styles = {str(span.style): middle.plain[span.start : span.end] for span in middle.spans}
    assert styles["bold green"] == "is"


def test_show_displays_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    shell, display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(shell)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(display)["display"] = shown.append
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    OUTPUT.show()
    assert shown == [OUTPUT]
