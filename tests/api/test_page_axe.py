"""axe-core, which judges accessibility, finds nothing in the page's states, on desks and phones."""

import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import ApiSettings
from diffray.components.checkpoints.demos import examples
from tests.helpers.api_server import serve
from tests.helpers.needed import needed, npm
from tools.browser import Browser, chromium
from tools.page import COMPLETE, FAILED, FINAL, PLAYED, ask, intercept, opened, watch_slowly

pytestmark = pytest.mark.long

PROMPT = examples("demo")[0]
KEY = "key"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    npm(folder, "pack", "axe-core@4")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as packed:
        script = packed.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with chromium(needed("chromium")) as tab:
        tab.call("Page.setBypassCSP", enabled=True)  # axe makes markup of texts
        yield tab


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def dark(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def judge(tab: Browser, axe: str, dark: bool) -> Callable[[], None]:
    """Show the page as it is now on a desk and on a phone, and expect no findings."""

    def judge() -> None:
        tab.evaluate(f"{axe}; 0")
        for width, height, phone in ((390, 844, True), (1280, 860, False)):
            tab.show_as(width, height, dark=dark, phone=phone)
            result: dict[str, Any] = tab.evaluate(
                "axe.run().then(({passes, violations}) => ({passes: passes.length, violations:"
                "violations.map(({id, nodes}) => [id, nodes.map(({html}) => html.slice(0, 99))])}))"
            )
            assert result["violations"] == [] and result["passes"] > 20

    tab.show_as(1280, 860, dark=dark)
    return judge


def anew(tab: Browser, url: str) -> None:
    opened(tab, url)
    tab.choose("[name=pace]", "0")


def test_a_chat_is_fine(tab: Browser, demo_url: str, judge: Callable[[], None]) -> None:
    anew(tab, demo_url)
    tab.wait("document.querySelectorAll('#examples button').length")
    judge()
    ask(tab, PROMPT)
    tab.wait(f"{COMPLETE} && {PLAYED}")
    tab.click(".code summary")
    tab.click("[data-language=curl]")
    tab.evaluate("document.querySelector('.canvas').focus()")
    judge()
    anew(tab, demo_url)
    tab.click("#compare")
    tab.click(".policy summary")
    tab.choose(".pane:first-child [data-field=decoder] select", "threshold")
    for _ in range(2):  # the first turn stays above
        ask(tab, PROMPT)
        tab.wait(f"{COMPLETE} && {PLAYED}")
    judge()


def test_other_answers_are_fine(tab: Browser, demo_url: str, judge: Callable[[], None]) -> None:
    for is_stopped in (False, True):
        anew(tab, demo_url)
        intercept(tab, max_tokens=512, min_tokens=512)
        watch_slowly(tab, 512)
        ask(tab, PROMPT)
        tab.wait(f"{FINAL} > 4 && document.querySelector('[data-part=state]').textContent")
        assert tab.text("[data-part=state]") == "denoising"
        if is_stopped:
            tab.click("#send")
            tab.wait(FAILED)
        judge()
    anew(tab, demo_url)
    tab.choose("[data-field=decoder] select", "fixed")
    tab.choose("[data-field=iteration] select", "soft")
    ask(tab, PROMPT)
    tab.wait(FAILED)
    judge()
    anew(tab, demo_url)
    intercept(tab, stop=["d", "def"])
    ask(tab, PROMPT)
    tab.wait("document.querySelector('.answer').textContent === '(empty answer)'")
    judge()


def test_a_filled_gap_is_fine(tab: Browser, demo_url: str, judge: Callable[[], None]) -> None:
    anew(tab, demo_url)
    tab.click("input[value=infill]")
    ask(tab, "def total(numbers)")
    tab.wait("document.querySelector('#notice').textContent")
    judge()
    anew(tab, demo_url)
    tab.click("input[value=infill]")
    ask(tab, "12+30=[gap].")
    tab.wait(f"{COMPLETE} && {PLAYED}")
    assert tab.text(".answer mark")
    judge()


def test_asking_for_a_key_is_fine(tab: Browser, demo: Service, judge: Callable[[], None]) -> None:
    with serve(demo, ApiSettings(api_keys=(KEY,))) as url:
        opened(tab, url)
        tab.wait("!document.querySelector('#key').hidden")
        judge()
        for key, said in (("wrong", "startsWith('Incorrect API key')"), (KEY, "length === 0")):
            tab.evaluate("document.querySelector('#key input').value = ''")
            tab.click("#key input")
            tab.type(key)
            tab.press("Enter")
            tab.wait(f"document.querySelector('#notice').textContent.{said}")
            judge()
