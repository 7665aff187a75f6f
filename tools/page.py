"""What a person does on the page, driven in a browser."""

import json
from typing import Any, Final

from tools.browser import Browser

PLAYED: Final = "document.querySelector('[name=play]').textContent === 'Play'"
FINAL: Final = "document.querySelectorAll('.cell.final').length"
STATE: Final = "document.querySelector('[data-part=state]').textContent"
COMPLETE: Final = f"{STATE}.startsWith('complete')"
FAILED: Final = "!document.querySelector('[data-part=failure]').hidden"


def opened(tab: Browser, url: str) -> Browser:
    """Open the page as in a new tab, which has kept nothing."""
    forget = {"source": "sessionStorage.clear()"}
    script = tab.call("Page.addScriptToEvaluateOnNewDocument", **forget)
    tab.open(f"{url}/")
    tab.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    tab.wait("document.querySelectorAll('.field').length")
    return tab


def ask(browser: Browser, prompt: str) -> None:
    browser.click("[name=prompt]")
    browser.type(prompt)
    browser.press("Enter")


def watch_slowly(browser: Browser, steps: int = 24) -> None:
    browser.choose("[data-field=decoder] select", "fixed")
    browser.choose("[data-field=steps] input", str(steps))
    browser.choose("[data-field=max_tokens] input", "96")  # over which the steps are spread


def intercept(browser: Browser, **fields: Any) -> None:
    """Add fields to what the page sends from now on; `window.sent` is the last body."""
    browser.evaluate(
        f"""(() => {{ const original = fetch; window.fetch = (path, options) => {{
        if (!options?.body) return original(path, options);
        window.sent = {{...JSON.parse(options.body), ...{json.dumps(fields)}}};
        return original(path, {{...options, body: JSON.stringify(window.sent)}});
        }}; return 0; }})()"""
    )
