"""The page in a browser: real clicks and keys, real answers, below a prefix."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from diffray.cluster.api.errors import Json
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import Load
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import load_local
from diffray.components.checkpoints.demos import FUNCTION, TOY
from tests.helpers.api_server import serve
from tests.helpers.needed import needed
from tools.browser import Browser, chromium
from tools.page import (
    COMPLETE,
    FAILED,
    FINAL,
    PLAYED,
    ask,
    intercept,
    opened,
    watch_slowly,
)

pytestmark = pytest.mark.slow

PROMPT = FUNCTION
OTHER = "What is 12 plus 30?"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
GAP = "The pens cost 3*4=[gap] dollars. The answer is 12."  # which demo fills, if not right
AWKWARD = "What's \"7\" \\ plus $HOME `id` '\u00e9'?"
PREFIX = "/models/demo"
SHOWN = "document.querySelector('{}').checkVisibility()"
TOP = "document.querySelector('{}').getBoundingClientRect().y"
COLUMNS = (
    "getComputedStyle(document.querySelector('.canvas')).gridTemplateColumns.split(' ').length"
)


class Two(Service):
    """A model under two names, each described on its own, as of two models behind an ingress."""

    def describe(self, name: str, load: Load) -> Json:
        found = super().describe(name, load)
        accepts = {"iteration": ["block_diffusion"], "cache": ["none", "exact"], "suffix": False}
        return found if name == "demo" else found | {"examples": [OTHER], "accepts": accepts}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    engine, tokenizer = load_local("demo", EngineConfig(max_num_seqs=4, dtype="float64"))
    about, prompts = f"demo {TOY}.", [PROMPT, HOSTILE]
    service = Two(engine, tokenizer, ["demo", "alias"], description=about, examples=prompts)
    with engine, closing(service):
        yield service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serve(service, prefix=PREFIX) as url:
        yield url


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with chromium(needed("chromium")) as browser:
        yield browser


@pytest.fixture
def tab(running: Browser) -> Iterator[Browser]:
    """A tab on a desk, whose console has no errors after the test but those that it took."""
    running.show_as(1280, 860)
    running.complaints.clear()
    yield running
    running.settle()
    assert running.complaints == []


@pytest.fixture
def browser(tab: Browser, url: str) -> Browser:
    """The page, opened anew."""
    return opened(tab, url)


def test_a_chat_is_watched_and_read(browser: Browser, url: str) -> None:
    browser.wait("document.querySelectorAll('#examples button').length === 2")
    assert browser.evaluate("document.activeElement.name") == "prompt"
    assert browser.evaluate(SHOWN.format("#player")) is False
    watch_slowly(browser)
    browser.click("#examples button")
    browser.click("#send")
    browser.wait(f"{COMPLETE} && {PLAYED}")
    assert browser.evaluate(SHOWN.format("#player")) is True
    diffusion = {"decoder": {"kind": "fixed", "steps": 24, "remasking": "low_confidence"}}
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 96}
    right = httpx2.post(
        f"{url}/v1/chat/completions", json=body | {"diffusion": diffusion}, timeout=60
    ).json()
    assert browser.text(".answer") == right["choices"][0]["message"]["content"]
    shown = [browser.text(f"[data-part={name}]") for name in ("forwards", "tokensPerForward")]
    totals = right["diffusion"]
    assert shown == [str(totals["forwards"]), f"{totals['tokens_per_forward']:.2f}"]
    assert browser.text("[data-part=cached]") == "0"
    assert browser.text("[data-part=state]") == "complete"
    assert "mono" in browser.evaluate(
        "getComputedStyle(document.querySelector('.answer pre')).fontFamily"
    )
    answer, canvas = (browser.evaluate(TOP.format(each)) for each in (".answer", ".canvas"))
    assert answer < canvas
    dimmed = "[...document.querySelectorAll('.cell')].map((cell) => cell.matches('.beyond'))"
    num_text = right["usage"]["completion_tokens"] - 1  # without the end token
    assert browser.evaluate(dimmed) == [False] * num_text + [True] * (96 - num_text)
    colours = browser.evaluate(
        "[...new Set([...document.querySelectorAll('.cell.final:not(.beyond)')]"
        ".map((cell) => getComputedStyle(cell).backgroundColor))].length"
    )
    assert colours > totals["forwards"] / 2
    assert {each.startswith(f"{url}/") for each in browser.loads if "blank" not in each} == {True}


def test_the_forwards_are_paused_and_scrubbed(browser: Browser) -> None:
    """And a token says when, and how surely, it became final."""
    watch_slowly(browser)
    browser.choose("[name=pace]", "0")
    ask(browser, PROMPT)
    browser.wait(PLAYED)
    everything = browser.evaluate(FINAL)
    assert browser.text("[data-part=state]") == "complete"
    browser.choose("[name=pace]", "1")
    browser.click("[name=play]")
    assert browser.text("[name=play]") == "Pause" and browser.evaluate(FINAL) < everything
    browser.click("[name=play]")
    assert browser.evaluate(PLAYED)
    browser.choose("[name=position]", "0")
    assert browser.evaluate(FINAL) == 0 and browser.text(".answer") == ""
    assert browser.text("[data-part=state]") == "denoising"
    finals = []
    for _ in range(4):
        browser.click("[name=forth]")
        finals.append(browser.evaluate(FINAL))
    assert 0 < finals[0] < finals[1] < finals[2] < finals[3] < everything
    browser.click("[name=back]")
    assert browser.evaluate(FINAL) == finals[2]
    browser.evaluate("document.querySelector('[name=position]').focus()")
    browser.press("ArrowLeft")
    assert browser.evaluate(FINAL) == finals[1]
    assert browser.text("#player output").startswith("2 / ")
    browser.choose("[name=position]", str(everything))
    browser.evaluate("document.querySelector('.canvas').focus()")
    for key, position in (("ArrowRight", 2), ("ArrowDown", 2 + browser.evaluate(COLUMNS))):
        browser.press(key)
        note = browser.text("[data-part=note]")
        assert note.startswith(f"Position {position} ") and "final at forward" in note
        assert 0 < float(note.rpartition("probability ")[2]) <= 1
    chosen = browser.evaluate(
        "document.querySelector('.canvas').getAttribute('aria-activedescendant')"
    )
    label = browser.evaluate(f"document.getElementById('{chosen}').getAttribute('aria-label')")
    assert label.startswith(f"{position}: ") and "forward" in label
    browser.click(".cell:nth-child(5)")
    assert browser.text("[data-part=note]").startswith("Position 5 ")
    browser.click("[name=prompt]")
    browser.type("half a question")
    browser.click("#clear")
    assert browser.evaluate(SHOWN.format("#player")) is False
    assert browser.evaluate("document.querySelector('[name=prompt]').value") == ""


def test_nothing_moves_while_tokens_appear(browser: Browser) -> None:
    watch_slowly(browser)
    browser.choose("[name=pace]", "5")
    ask(browser, PROMPT)
    browser.wait(f"{FINAL} > 0 && document.querySelector('#send').textContent === 'Send'")
    # These have room of their own: the answer, the state and the policy in words, and the sounds.
    others = ":not(.answer *, .room *, [data-part=state], [data-part=made], [data-part=said])"
    places = f"""[...document.querySelectorAll(".pane *{others}, footer *")].map((each) => {{
        const {{x, y, width, height}} = each.getBoundingClientRect();
        return [each.tagName, x, y, width, height].join();
    }})"""
    before = browser.evaluate(places)
    browser.wait(PLAYED)
    moved = {
        one for one, other in zip(before, browser.evaluate(places), strict=True) if one != other
    }
    assert moved == set()


def test_two_policies_answer_side_by_side(browser: Browser) -> None:
    """Each pane says what is to come, and how its answer was made."""

    def each_of(selector: str, value: str) -> list[Any]:
        script = f"[...document.querySelectorAll('{selector}')].map((each) => {value})"
        found: list[Any] = browser.evaluate(script)
        return found

    def named() -> list[Any]:
        return each_of("[data-part=name]", "each.textContent")

    assert each_of(".hint", "each.checkVisibility()") == [False]
    browser.show_as(1280, 800)
    browser.choose("[name=pace]", "0")
    browser.click("#compare")
    assert each_of(".hint", "each.checkVisibility()") == [True, True]
    ask(browser, PROMPT)
    browser.wait(PLAYED)
    assert each_of(".hint", "each.checkVisibility()") == [False, False]
    assert named() == ["Policy A", "Policy B"]
    first, second = each_of("[data-part=forwards]", "+each.textContent")
    assert first < second
    left, right = each_of(".pane", "each.getBoundingClientRect().x")
    assert left < right
    bottom = browser.evaluate(TOP.format("footer"))
    for part in (".answer", "dl"):
        assert max(each_of(part, "each.getBoundingClientRect().bottom")) < bottom
    browser.choose("[name=position]", "1")
    first, second = each_of(".canvas", 'each.querySelectorAll(".final").length')
    assert first > second > 0
    made = browser.text("[data-part=made]")
    assert made == "demo \u00b7 the server's default"
    browser.choose(".pane:first-child [data-field=decoder] select", "credit")
    assert browser.text("[data-part=made]") == made
    assert "decoder credit" in browser.text("[data-part=summary]")
    ask(browser, OTHER)
    browser.wait(f"{PLAYED} && document.querySelectorAll('.turns').length === 2")
    assert each_of(".turns", "each.children.length") == [3, 3]
    browser.click("#compare")
    assert named() == ["Policy"]


def test_each_model_has_its_examples_policies_and_answers(browser: Browser) -> None:
    def kinds(field: str) -> list[str]:
        options = f"[...document.querySelector('[data-field={field}] select').options]"
        found: list[str] = browser.evaluate(f"{options}.map((each) => each.value)")
        return found

    examples = "document.querySelectorAll('#examples button').length"
    browser.wait(f"{examples} === 2 && document.querySelectorAll('#model option').length === 2")
    assert browser.text("#about") == f"demo {TOY}."
    assert kinds("cache") == ["", "none", "prefix", "dual", "vicinity"]
    browser.choose("[data-field=cache] select", "dual")
    browser.choose("[data-field=block_length] input", "16")
    browser.click("input[value=infill]")
    browser.choose("#model", "alias")
    assert kinds("cache") == ["", "none", "exact"]
    assert kinds("iteration") == ["", "block_diffusion"]
    said = browser.text("[data-part=summary]")
    assert "cache" not in said and "block length 16" in said
    gap = "document.querySelector('input[value=infill]')"
    assert browser.evaluate(f"{gap}.disabled && !{gap}.checked")
    assert browser.evaluate(examples) == 1
    ask(browser, "Hello")
    browser.wait(f"{COMPLETE} && {PLAYED}")
    browser.click("#examples button")
    browser.click("#send")
    browser.wait(f"{COMPLETE} && {PLAYED}")
    assert browser.text(".turns") == f"You: {OTHER}", "an example begins a new chat"
    browser.choose("#model", "demo")
    assert browser.evaluate(f"!{gap}.disabled")
    assert browser.evaluate(examples) == 2
    assert browser.evaluate(SHOWN.format("#examples button"))


def test_a_gap_is_marked_and_filled(browser: Browser) -> None:
    """Also that of an example."""
    browser.choose("[name=pace]", "0")
    browser.click("input[value=infill]")
    browser.click("#examples button")
    browser.click("#send")
    browser.wait(f"{COMPLETE} && {PLAYED}")
    assert browser.text(".answer mark") == "19"
    browser.evaluate("document.querySelector('[name=prompt]').value = ''")
    ask(browser, "def total(numbers): return")
    assert "Mark one gap" in browser.text("#notice")
    browser.evaluate("document.querySelector('[name=prompt]').setSelectionRange(4, 18)")
    browser.click("#mark")
    browser.wait("document.querySelector('[name=size]').value !== '8'")
    size = int(browser.evaluate("document.querySelector('[name=size]').value"))
    browser.click("#send")
    browser.wait(PLAYED)
    assert browser.text("#notice") == ""
    assert browser.evaluate("document.querySelectorAll('.cell').length") == size > 1
    shown = browser.text(".answer")
    assert shown.startswith("def ") and shown.endswith(": return")
    assert shown == f"def {browser.text('.answer mark')}: return"


def test_a_refusal_is_shown_and_sent_again_with_another_policy(browser: Browser) -> None:
    browser.choose("[name=pace]", "0")
    browser.choose("[data-field=decoder] select", "fixed")
    browser.choose("[data-field=iteration] select", "soft")
    ask(browser, PROMPT)
    browser.wait(FAILED)
    assert "'fixed' has none" in browser.text("[data-part=reason]")
    browser.wait("document.querySelectorAll('.cell').length === 0")
    browser.choose("[data-field=iteration] select", "blockwise")
    browser.click("[data-part=again]")
    browser.wait(COMPLETE)
    assert browser.evaluate("document.querySelector('[data-part=failure]').hidden")
    assert browser.take_complaints("status of 400") == 1


def test_texts_are_never_markup(browser: Browser) -> None:
    browser.wait("document.querySelectorAll('#examples button').length === 2")
    assert browser.text("#examples button:last-child") == HOSTILE
    ask(browser, HOSTILE)
    browser.wait(PLAYED)
    assert browser.text(".turns .user div") == HOSTILE
    browser.click("input[value=infill]")
    ask(browser, f"{HOSTILE}[gap]{HOSTILE}")
    browser.wait(f"{PLAYED} && document.querySelector('.answer mark') !== null")
    assert browser.text(".answer").startswith(HOSTILE)
    assert (
        browser.evaluate("document.querySelectorAll(':is(main, footer) :is(img, script)').length")
        == 0
    )
    refused = "try { document.body.innerHTML = 'x'; 'made' } catch (error) { error.name }"
    assert browser.evaluate(refused) == "TypeError"
    assert browser.take_complaints("TrustedHTML") >= 1


def test_a_key_is_asked_for_and_kept_nowhere(tab: Browser, service: Service) -> None:
    with serve(service, ApiSettings(api_keys=("right",))) as url:
        browser = opened(tab, url)
        browser.wait("!document.querySelector('#key').hidden")
        assert browser.text("#notice") == "This server needs an API key."
        for key, words in (("wrong", "Incorrect API key"), ("right", "")):
            browser.evaluate("document.querySelector('#key input').value = ''")
            browser.click("#key input")
            browser.type(key)
            browser.press("Enter")
            browser.wait(f"document.querySelector('#notice').textContent.startsWith('{words}')")
        browser.wait("document.querySelectorAll('#model option').length === 2")
        browser.choose("#model", "alias")
        ask(browser, PROMPT)
        browser.wait(COMPLETE)
        browser.click(".code summary")
        browser.click("[data-language=python]")
        program = browser.text("[data-part=code]")
        assert 'model="alias"' in program and "DIFFRAY_API_KEY" in program
        stored = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])"
        browser.call("Page.reload")
        browser.wait("document.querySelector('#notice')?.textContent.includes('needs an API key')")
        kept = browser.evaluate(stored)
        assert PROMPT in kept and "right" not in kept
        assert browser.evaluate("document.querySelector('#key input').value") == ""
        assert browser.take_complaints("status of 401") == 3


@pytest.mark.parametrize("task", ["chat", "infill"])
@pytest.mark.parametrize("language", ["curl", "python", "javascript"])
@pytest.mark.rotate(3)
def test_what_is_copied_runs(browser: Browser, language: str, task: str, tmp_path: Path) -> None:
    programs = {"curl": "sh", "python": sys.executable, "javascript": "node"}
    needed(language if language == "curl" else programs[language])
    browser.choose("[name=pace]", "0")
    browser.choose("[data-field=decoder] select", "credit")
    browser.click(f"input[value={task}]")
    ask(browser, AWKWARD if task == "chat" else f"{AWKWARD} {GAP}")
    browser.wait(f"{COMPLETE} && {PLAYED}")
    shown = browser.text(".answer" if task == "chat" else ".answer mark")
    browser.click(".code summary")
    browser.click(f"[data-language={language}]")
    browser.click("[data-part=copy]")
    browser.wait("document.querySelector('[data-part=copy]').textContent === 'Copied'")
    file = tmp_path / {"curl": "ask.sh", "python": "ask.py", "javascript": "ask.mjs"}[language]
    file.write_text(pasted(browser))
    done = subprocess.run(
        [programs[language], str(file)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    if language == "curl":
        (choice,) = json.loads(said)["choices"]
        said = choice["message"]["content"] if task == "chat" else choice["text"]
    assert said.strip() == shown.strip() not in ("", "(empty answer)")


def pasted(browser: Browser) -> str:
    """Return what is pasted into the prompt."""
    browser.evaluate("document.querySelector('[name=prompt]').value = ''")
    browser.click("[name=prompt]")
    about = {"key": "v", "modifiers": 2, "windowsVirtualKeyCode": 86}
    browser.call("Input.dispatchKeyEvent", type="rawKeyDown", commands=["paste"], **about)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **about)
    return str(browser.evaluate("document.querySelector('[name=prompt]').value"))


def test_what_the_controls_say_is_sent(browser: Browser) -> None:
    intercept(browser)
    browser.choose("[name=pace]", "0")
    assert browser.evaluate(SHOWN.format(".field")) is False
    browser.click(".policy summary")
    browser.choose("[data-field=decoder] select", "threshold")
    for name, value in (("temperature", "0.7"), ("seed", "11")):
        browser.click(f"[data-field={name}] input")
        browser.type(value)
    browser.evaluate("document.querySelector('[data-field=threshold] [type=range]').focus()")
    before = float(browser.evaluate("document.activeElement.value"))
    for _ in range(3):
        browser.press("ArrowLeft")
    browser.evaluate("document.activeElement.blur()")
    set_to = float(browser.evaluate("document.querySelector('[data-field=threshold] input').value"))
    assert set_to == pytest.approx(before - 0.03)
    ask(browser, PROMPT)
    browser.wait(PLAYED)
    sent = browser.evaluate("window.sent")
    assert (sent["temperature"], sent["seed"]) == (0.7, 11)
    decoder = sent["diffusion"]["decoder"]
    assert (decoder["kind"], decoder["threshold"]) == ("threshold", set_to)
    assert "temperature 0.7" in browser.text("[data-part=made]")
    first = browser.text(".answer")
    browser.click("#clear")
    ask(browser, PROMPT)
    browser.wait(PLAYED)
    assert browser.text(".answer") == first, "the seed decides"


def test_stop_ends_the_answer_here_and_at_the_server(browser: Browser, url: str) -> None:
    intercept(browser, max_tokens=768, min_tokens=768)
    browser.choose("[name=pace]", "0")
    watch_slowly(browser, 768)
    ask(browser, PROMPT)
    browser.wait(f"{FINAL} > 0")
    assert browser.text("#send") == "Stop"
    browser.click("#send")
    browser.wait(FAILED)
    assert browser.text("[data-part=reason]") == "Stopped."
    browser.wait("document.querySelector('[data-part=state]').textContent === 'incomplete'")
    assert browser.text("#send") == "Send" and browser.evaluate(FINAL) < 768
    end = time.monotonic() + 60
    while httpx2.get(f"{url}/load").json()["running"]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_reload_keeps_the_chat_also_half_an_answer(browser: Browser) -> None:
    browser.choose("[name=pace]", "0")
    watch_slowly(browser)
    ask(browser, PROMPT)
    browser.wait(f"{COMPLETE} && {PLAYED}")
    shown = ".turns", ".answer", "[data-part=forwards]", "[data-part=summary]", "#player output"
    before = [browser.text(each) for each in shown]
    browser.type("half a question")
    reload(browser)
    browser.wait(COMPLETE)
    assert [browser.text(each) for each in shown] == before
    value = "document.querySelector('[name=prompt]').value"
    assert browser.evaluate(value) == "half a question"
    browser.evaluate(f"{value} = ''")
    intercept(browser, max_tokens=768, min_tokens=768)
    browser.choose("[data-field=steps] input", "768")
    browser.choose("[name=pace]", "0")
    ask(browser, OTHER)
    browser.wait(f"{FINAL} > 8")
    reload(browser)
    browser.wait(FAILED)
    assert "was left before" in browser.text("[data-part=reason]")
    assert browser.evaluate("document.querySelector('.turns').children.length") == 3
    assert 8 < browser.evaluate(FINAL) < 768
    browser.click("#clear")
    reload(browser)
    browser.wait("document.querySelectorAll('.field').length")
    assert browser.evaluate(SHOWN.format("#hello")) is True


def reload(browser: Browser) -> None:
    browser.evaluate("window.isOld = true")
    browser.call("Page.reload")
    browser.wait("!window.isOld && document.readyState === 'complete'")


def test_a_lowered_limit_is_told(browser: Browser) -> None:
    browser.choose("[data-field=max_tokens] input", "5000")
    ask(browser, PROMPT)
    browser.wait(COMPLETE)
    assert browser.text("[data-part=warnings]").startswith("max_tokens is lowered from 5000")
    assert browser.evaluate("document.querySelectorAll('.cell').length") == 128, "the first canvas"


def test_the_keyboard_reaches_everything_and_a_phone_shows_it(browser: Browser) -> None:
    """Without scrolling sideways."""
    browser.choose("[name=pace]", "0")
    ask(browser, PROMPT)
    browser.wait(PLAYED)
    browser.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        name = "(({id, name, dataset, className}) => id || name || dataset.part || className)"
        reached.add(browser.evaluate(f"{name}(document.activeElement)"))
    assert {"model", "compare", "clear", "canvas", "play", "position", "pace", "send"} <= reached
    browser.evaluate("document.querySelector('.policy summary').focus()")
    browser.press("Enter")
    assert browser.evaluate(SHOWN.format(".field")) is True
    browser.press("Escape")
    assert browser.evaluate(SHOWN.format(".field")) is False
    assert browser.evaluate("document.activeElement.tagName") == "SUMMARY"
    browser.show_as(390, 844, phone=True)
    browser.click("#compare")
    browser.click(".code summary")
    browser.click("[data-language=curl]")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
