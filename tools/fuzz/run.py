"""Sends the cases of a run to a server, some at a time, and judges what comes back."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import httpx2

from tools.fuzz.cases import Case, case
from tools.fuzz.judge import Broken, Findings, judge

GIVE_UP_S = 60.0


class Prober:
    """A client that notes how each of its requests was answered."""

    def __init__(self, url: str, slowest: float, *, proxied: bool = False) -> None:
        self.findings = Findings()
        self._slowest, self._proxied, self._lock = slowest, proxied, Lock()
        self._http = httpx2.Client(
            base_url=url, timeout=GIVE_UP_S, limits=httpx2.Limits(max_connections=None)
        )

    def try_case(self, made: Case, name: str) -> None:
        """Send a case; `name` is what a fault is found again by."""
        headers = [(key.encode(), value.encode("latin-1")) for key, value in made.headers.items()]
        begin, fault, outcome = time.perf_counter(), None, "broken"
        try:
            answer = self._http.request(made.method, made.path, content=made.body, headers=headers)
            outcome = judge(answer, answer.content, proxied=self._proxied)
        except Broken as error:
            fault = str(error)
        except httpx2.HTTPError as error:
            fault = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - begin
        if fault is None and seconds > self._slowest:
            fault = f"an answer after {seconds:.1f} s"
        with self._lock:
            self.findings.note(made.kind, outcome, seconds)
            if fault is not None:
                self.findings.faults.append(f"{name} ({made.kind}): {fault}")

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until nothing runs or waits; note a fault if pages stay, or the server is ill."""
        end = time.monotonic() + seconds
        while not self._idle():
            if time.monotonic() > end:
                self.findings.faults.append(f"afterwards: {self._get('/load').text}")
                return
            time.sleep(0.05)
        if self._get("/health").status_code != 200:
            self.findings.faults.append("afterwards: the server is not healthy")

    def _idle(self) -> bool:
        load: dict[str, Any] = self._get("/load").json()
        busy = load["running"] or load["waiting"] or load["free_pages"] < load["num_pages"]
        return not busy

    def _get(self, path: str) -> httpx2.Response:
        return self._http.get(path)


def probe(
    url: str,
    numbers: Iterable[int],
    *,
    seed: int,
    slowest: float,
    at_once: int = 8,
    heavy: bool = True,
    proxied: bool = False,
    tell: Callable[[int], None] = lambda _: None,
) -> Findings:
    """Try a server with the cases of these numbers."""
    prober = Prober(url, slowest, proxied=proxied)

    def one(number: int) -> None:
        prober.try_case(case(seed, number, heavy=heavy), f"--seed {seed} --only {number}")
        tell(number)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, numbers))
    prober.settle()
    return prober.findings
