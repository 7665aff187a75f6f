"""The page of a real server in a browser: two replicas, below a path prefix."""

import json
import os
import signal

import pytest

from tests.helpers.needed import needed
from tests.helpers.served import KEY, Served
from tools.browser import chromium
from tools.page import COMPLETE, FAILED, FINAL, STATE, ask, intercept, opened, watch_slowly

pytestmark = pytest.mark.long

PROMPT = "What is 12 plus 30?"


def test_an_answer_outlives_a_rank_and_says_that_its_replica_is_lost(served: Served) -> None:
    words = "; 1 request continues on a new worker group"
    tokens = served.long["demo"]["max_tokens"]
    continued = served.said.count(words)
    with chromium(needed("chromium")) as tab:
        page = opened(tab, f"{served.url}/demo")
        page.wait("!document.querySelector('#key').hidden")
        page.click("#key input")
        page.type(KEY)
        page.press("Enter")
        page.wait("document.querySelectorAll('#model option').length")
        page.choose("[name=pace]", "0")
        intercept(page, max_tokens=tokens, min_tokens=tokens)
        watch_slowly(page, tokens)

        ask(page, PROMPT)
        page.wait(f"{FINAL} > 8")
        os.kill(served.busiest("ray::Worker"), signal.SIGKILL)
        page.wait(f"{COMPLETE} || {FAILED} || {FINAL} === {tokens}")
        page.wait("document.querySelector('#send').textContent === 'Send'")
        assert not page.evaluate(FAILED), page.text("[data-part=reason]")
        whole = page.text(".answer")
        served.wait_for(words, continued + 1)

        page.click("#clear")
        ask(page, PROMPT)
        page.wait(f"{FINAL} > 8")
        os.kill(served.busiest("ray::ServeReplica:demo:Replica"), signal.SIGKILL)
        page.wait(FAILED)
        reason = page.text("[data-part=reason]")
        assert "again" in reason or "connection was lost" in reason
        assert reason.endswith("What arrived before is shown.")
        page.wait(f"{STATE} === 'incomplete'")  # drawn a frame after the failure
        arrived = page.text(".answer")
        assert whole.startswith(arrived) and page.evaluate(FINAL) > 8
        page.click("[data-part=again]")
        page.wait(f"document.querySelector('.answer').textContent === {json.dumps(whole)}")
        assert not page.evaluate(FAILED), page.text("[data-part=reason]")
        page.take_complaints("status of 401")
        page.take_complaints("net::ERR_INCOMPLETE_CHUNKED_ENCODING")
        assert page.complaints == []
