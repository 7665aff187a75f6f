"""News between coordinator and replica: in order, none lost, none twice, bounded."""

import asyncio
from typing import Any

from diffray.cluster.news import ENDED, PIECES, UPDATE, Bulletin, Mailbox


def update(uid: int, token: int, **more: Any) -> list[Any]:
    reason = more.get("reason")
    return [
        UPDATE,
        uid,
        [uid, [token], [1], [0.5], reason, None, token, [0, token], [], [token], 0],
    ]


def test_who_does_not_read_gets_all_tokens_in_few_pieces() -> None:
    async def run() -> list[list[Any]]:
        mailbox = Mailbox()
        for token in range(10 * PIECES):
            mailbox.put(update(7, token, reason="stop" if token == 10 * PIECES - 1 else None))
        assert len(mailbox._pieces) == PIECES
        return [await mailbox.get() for _ in range(PIECES)]

    pieces = [item[2] for item in asyncio.run(run())]
    assert [token for piece in pieces for token in piece[1]] == list(range(10 * PIECES))
    assert len(pieces[-1][2]) == len(pieces[-1][3]) == len(pieces[-1][1])
    last = 10 * PIECES - 1
    assert pieces[-1][4] == "stop" and pieces[-1][6:8] == [last, [0, last]]
    assert pieces[-1][9] == [last], "of canvases the last is enough"


def test_an_issue_is_given_again_until_the_next_is_asked_for() -> None:
    async def run() -> None:
        bulletin = Bulletin()
        assert await bulletin.after(0, 0.01) == (0, [])
        bulletin.put(update(1, 5))
        number, news = await bulletin.after(0, 1)
        assert await bulletin.after(0, 1) == (number, news), "the answer was lost on its way"
        bulletin.put(update(1, 6))
        assert await bulletin.after(0, 1) == (number, news)
        assert (await bulletin.after(number, 1))[1] == [update(1, 6)]

    asyncio.run(run())


def test_whoever_waited_before_takes_no_news_from_who_waits_now() -> None:
    async def run() -> None:
        bulletin = Bulletin()
        lost = asyncio.create_task(bulletin.after(0, 5))
        await asyncio.sleep(0)
        again = asyncio.create_task(bulletin.after(0, 5))
        await asyncio.sleep(0)
        bulletin.put(update(1, 5))
        assert await lost == await again == (1, [update(1, 5)])

    asyncio.run(run())


def test_the_end_comes_after_all_news() -> None:
    async def run() -> None:
        bulletin = Bulletin()
        bulletin.put(update(3, 1))
        bulletin.put(update(4, 1))
        bulletin.put([ENDED, "why"])
        _, news = await bulletin.after(0, 1)
        assert news == [update(3, 1), update(4, 1), [ENDED, "why"]]

    asyncio.run(run())
