"""The runner of comparisons, and the requests that comparisons with servers send."""

import asyncio
import sys
from functools import partial

import pytest

from benchmarks import load, paired
from tests.helpers.fake_endpoint import Answer, Asked, fake_endpoint


def test_turns_alternate_and_the_first_does_not_count() -> None:
    seen: list[str] = []

    def take(name: str, number: int) -> int:
        seen.append(name)
        return number

    found = paired.take_turns({name: partial(take, name) for name in "ab"}, 3)
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert "".join(seen) == "baabbaab"


def test_a_ratio_is_of_turns_that_belong_together() -> None:
    """The machine was half as fast in the second turn: both were."""
    assert paired.ratio([10.0, 5.0], [5.0, 2.5]) == "2.00 (2.00 to 2.00)"
    assert paired.ratio([6.0, 10.0, 8.0], [2.0, 2.0, 4.0]) == "3.00 (2.00 to 5.00)"
    mine, other = [paired.Turn(1, [[1, 2], [3, 4]])], [paired.Turn(1, [[1, 2], [3, 5]])]
    assert paired.equal_answers(mine, other) == "1/2"
    assert paired.equal_tokens(mine, other) == "3/4"


def test_a_program_answers_a_line_with_a_line_until_it_ends() -> None:
    code = "import json, os; print(json.dumps([json.loads(input()), os.environ['WORD']]))"
    with paired.answering([sys.executable, "-c", code], {"WORD": "b"}) as send:
        assert send(["a"]) == [["a"], "b"]
        with pytest.raises(ValueError, match="has ended"):
            send("more")


async def replies(url: str, bodies: list[load.Json], at_once: int) -> list[load.Reply]:
    async with load.client(url) as http:
        return await load.all_of(bodies, at_once, partial(load.streamed, http))


def chunk(text: str) -> load.Json:
    return {"choices": [{"delta": {"content": text}}]}


def test_a_streams_chunks_with_text_are_timed() -> None:
    def stream(_: Asked) -> Answer:
        chunks: list[load.Json | str] = [chunk(""), chunk("a b"), chunk(" c"), {"choices": []}]
        return Answer(chunks=iter([*chunks, "[DONE]"]))

    with fake_endpoint(stream) as endpoint:
        (reply,) = asyncio.run(replies(endpoint.url, [{"model": "m"}], 1))
        assert endpoint.asked[0].body == {"model": "m", "stream": True}
    assert (reply.text, len(reply.chunks_s)) == ("a b c", 2)
    assert 0 < reply.headers_s < reply.chunks_s[0] <= reply.chunks_s[1] <= reply.end_s


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(chunks=iter([chunk("a")])), "broke off"),
        (Answer(chunks=iter([{"error": "lost"}])), "lost"),
        (Answer(429, {"error": "full"}), "status 429"),
    ],
)
def test_an_incomplete_answer_is_refused(answer: Answer, message: str) -> None:
    with fake_endpoint(lambda _: answer) as endpoint, pytest.raises(ValueError, match=message):
        asyncio.run(replies(endpoint.url, [{}], 1))
