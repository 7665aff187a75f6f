"""A second server on the machine, with another model and a key: its answers are never mixed up."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx2

from diffray.cluster.cli.endpoint import json_of
from tools.chaos.workload import Question, Tally, questions
from tools.serve_process import serve_process

MODEL = "demo-llada2"
_EACH_S = 1.0  # between its requests: the faults should not wait for it


class Neighbour:
    """Asks the second server, and the first one for what only the second one has."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url, key
        self._asked = questions(MODEL, count=2, tokens=32, seed=7)

    @asynccontextmanager
    async def watched(self, other_url: str, tally: Tally) -> AsyncIterator[None]:
        """Ask now and then, as long as the block runs."""
        task = asyncio.create_task(self._ask_on(other_url, tally))
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _ask_on(self, other_url: str, tally: Tally) -> None:
        number = 0
        # A proxy closes an idle connection after some seconds, perhaps as a request is sent on it.
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(timeout=60, limits=limits) as http:
            while True:
                question = self._asked[number % len(self._asked)]
                number += 1
                try:
                    await self._own(http, question, tally)
                except httpx2.TransportError as error:
                    tally.bad("lost", f"next door: {error!r}")
                await self._foreign(http, other_url, question, tally)
                await asyncio.sleep(_EACH_S)

    async def _own(self, http: httpx2.AsyncClient, question: Question, tally: Tally) -> None:
        """Ask the second server with its key and without: no fault hits it."""
        body = question.body | {"model": MODEL, "stream": False}
        answer = await self._post(http, self.url, body, self._key)
        tally.counts["asked next door"] += 1
        found = json_of(answer)
        if answer.status_code != 200 or not isinstance(found, dict):
            tally.bad("mixed", f"next door: status {answer.status_code}: {found}")
        elif found["model"] != MODEL or found["choices"][0]["token_ids"] != question.ids:
            tally.bad("mixed", f"next door: {found['model']}: {found['choices'][0]['token_ids']}")
        answer = await self._post(http, self.url, body, None)
        if answer.status_code != 401:
            tally.bad("mixed", f"next door without a key: status {answer.status_code}")

    async def _foreign(
        self, http: httpx2.AsyncClient, url: str, question: Question, tally: Tally
    ) -> None:
        """Ask the first server for the second one's model: it has none, and knows no keys."""
        body = question.body | {"model": MODEL, "stream": False}
        with suppress(httpx2.TransportError):  # what the faults do to it does not matter here
            answer = await self._post(http, url, body, self._key)
            if answer.status_code in (200, 401):
                tally.bad("mixed", f"status {answer.status_code} for the model next door")

    @staticmethod
    async def _post(
        http: httpx2.AsyncClient, url: str, body: dict[str, object], key: str | None
    ) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await http.post(f"{url}/v1/completions", json=body, headers=headers)


@contextmanager
def next_door() -> Iterator[Neighbour]:
    """Start the second server and wait until it answers."""
    key = secrets.token_hex(16)
    options = "--device cpu --cpu-threads 1 --dtype float64 --max-num-seqs 4".split()
    with serve_process(MODEL, *options, settings={"DIFFRAY_API_KEY": key}) as served:
        served.wait_for(" is ready at ", 1)
        yield Neighbour(served.url, key)
