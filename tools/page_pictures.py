"""Make the pictures of the page in docs/: `python -m tools.page_pictures`."""

import shutil
import sys
from pathlib import Path

from diffray.components.checkpoints.demos import EXAMPLE
from tools import page
from tools.browser import Browser, chromium
from tools.serve_process import serve_process

DOCS = Path(__file__).parents[1] / "docs"


def ask(tab: Browser, url: str, *, compare: bool = False) -> None:
    """Open the page anew and have the example answered in many forwards."""
    page.opened(tab, url)
    tab.choose("[name=pace]", "0")
    if compare:
        tab.click("#compare")
    else:
        page.watch_slowly(tab, 64)
    page.ask(tab, EXAMPLE)
    tab.wait(page.PLAYED)
    tab.evaluate("document.activeElement.blur(), scrollTo(0, 0)")


def part_way(tab: Browser, share: float) -> None:
    """Go back to where the canvas is still being denoised."""
    end = int(tab.evaluate("document.querySelector('[name=position]').max"))
    tab.choose("[name=position]", str(round(share * end)))
    states = "[...document.querySelectorAll('[data-part=state]')].map((each) => each.textContent)"
    assert "denoising" in tab.evaluate(states)


def main() -> None:
    program = shutil.which("chromium") or sys.exit("install Chromium, which takes the pictures")
    with serve_process("demo", "--device", "cpu") as served, chromium(program) as tab:
        served.wait_for(" is ready at ", 1)
        url = served.url
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        ask(tab, url)  # the first answer is slow
        for name, dark in (("page", False), ("page-dark", True)):
            tab.show_as(1280, 720, dark=dark)
            ask(tab, url)
            part_way(tab, 0.3)
            tab.screenshot(DOCS / f"{name}.png")
        tab.show_as(1280, 900)
        ask(tab, url, compare=True)
        part_way(tab, 0.35)
        tab.screenshot(DOCS / "page-two.png")
        tab.show_as(390, 844, phone=True)
        ask(tab, url)
        part_way(tab, 0.3)
        tab.screenshot(DOCS / "page-phone.png")


if __name__ == "__main__":
    main()
