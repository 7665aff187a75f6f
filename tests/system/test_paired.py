"""The runner of comparisons, and the requests that comparisons with servers send."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from benchmarks import load, paired
from tests.helpers.fake_endpoint import Answer, Asked, fake_endpoint


def test_turns_alternate_and_the_first_does_not_count() -> None:
    seen: list[tuple[str, int]] = []

    def contender(name: str) -> Callable[[int], int]:
        def take(number: int) -> int:
            seen.append((name, number))
            return number

        return take

    found = paired.take_turns({name: contender(name) for name in "ab"}, 3)
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert "".join(name for name, _ in seen) == "baabbaab"


def test_a_turn_is_timed_by_the_clock_that_was_chosen() -> None:
    now = iter([10.0, 12.0])
    turn = paired.Clock(lambda: next(now), "").timed(lambda number: [[number, 5], [6]])(4)
    assert (turn.seconds, turn.answers, turn.tokens, turn.rate) == (2.0, [[4, 5], [6]], 3, 1.5)


def test_a_ratio_is_of_turns_that_belong_together() -> None:
    """The machine was half as fast in the second turn: both were."""
    assert paired.ratio([10.0, 5.0], [5.0, 2.5]) == "2.00 (2.00 to 2.00)"
    assert paired.ratio([6.0, 10.0, 8.0], [2.0, 2.0, 4.0]) == "3.00 (2.00 to 5.00)"


def test_equal_answers_and_tokens() -> None:
    mine, other = paired.Turn(1, [[1, 2], [3, 4]]), paired.Turn(1, [[1, 2], [3, 5]])
    assert paired.equal_answers(mine, other) == "1/2"
    assert paired.equal_tokens(mine, other) == "3/4"


def test_a_table_is_markdown() -> None:
    assert paired.head("a", "b c") == "| a | b c |\n|---|---|"
    assert paired.row("a", 2, 3.5) == "| a | 2 | 3.5 |"


async def asked(url: str, bodies: list[load.Json], at_once: int) -> list[load.Reply]:
    async with load.client(url) as http:
        return await load.all_of(bodies, at_once, partial(load.streamed, http))


def chunk(text: str) -> load.Json:
    return {"choices": [{"delta": {"content": text}}]}


def test_a_streams_chunks_with_text_are_timed() -> None:
    def stream(_: Asked) -> Answer:
        said: list[load.Json | str] = [chunk(""), chunk("a b"), chunk(" c"), {"choices": []}]
        return Answer(chunks=iter([*said, "[DONE]"]))

    with fake_endpoint(stream) as endpoint:
        (reply,) = asyncio.run(asked(endpoint.url, [{"model": "m"}], 1))
        assert endpoint.asked[0].body == {"model": "m", "stream": True}
    assert (reply.text, len(reply.chunks_s)) == ("a b c", 2)
    assert 0 < reply.headers_s < reply.chunks_s[0] <= reply.chunks_s[1] <= reply.end_s


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(chunks=iter([chunk("a")])), "broke off"),
        (Answer(chunks=iter([{"error": "lost"}])), "lost"),
        (Answer(429, {"error": "full"}), "status 429"),
    ],
)
def test_what_is_no_whole_answer_is_refused(answer: Answer, says: str) -> None:
    with fake_endpoint(lambda _: answer) as endpoint, pytest.raises(ValueError, match=says):
        asyncio.run(asked(endpoint.url, [{}], 1))


def test_no_more_requests_are_under_way_than_were_asked_for() -> None:
    under_way, most = 0, 0

    async def ask(_: load.Json) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return 1

    assert sum(asyncio.run(load.all_of([{}] * 9, 3, ask))) == 9
    assert most == 3


def test_written_tokens_are_the_servers_usage() -> None:
    def answers() -> Iterator[load.Json]:
        yield from ({"usage": {"completion_tokens": count}} for count in (3, 4))

    assert load.written(list(answers())) == 7
