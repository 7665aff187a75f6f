"""News between coordinator and replica: in order, none lost, none twice, bounded."""

import asyncio

from diffray.cluster.control.events import PIECES, Bulletin, Event, Kind, Mailbox
from diffray.workers.messages import Progress, Update


def update(uid: int, token: int, reason: str | None = None) -> Event:
    progress = Progress(0, token)
    news = Update(uid, [token], [1], [0.5], reason, None, token, progress, canvas=[token])
    return Event(Kind.UPDATE, uid, news)


async def test_a_slow_reader_gets_all_tokens_in_few_pieces() -> None:
    mailbox, number = Mailbox(), 10 * PIECES - 1
    for token in range(number + 1):
        mailbox.put(update(7, token, reason="stop" if token == number else None))
    pieces = [
        event.update for event in [await mailbox.get() for _ in range(PIECES)] if event.update
    ]
    assert [token for piece in pieces for token in piece.ids] == list(range(number + 1))
    last = pieces[-1]
    assert len(last.steps) == len(last.logprobs) == len(last.ids)
    assert last.finish_reason == "stop" and (last.forwards, last.progress) == (number, (0, number))
    assert last.canvas == [number], "of canvases the last is enough"


async def test_an_issue_is_given_again_until_the_next_is_asked_for() -> None:
    bulletin = Bulletin()
    assert await bulletin.after(0, 0.01) == (0, [])
    bulletin.put(update(1, 5))
    number, news = await bulletin.after(0, 1)
    assert await bulletin.after(0, 1) == (number, news), "the answer was lost on its way"
    bulletin.put(update(1, 6))
    assert await bulletin.after(0, 1) == (number, news)
    assert (await bulletin.after(number, 1))[1] == [update(1, 6)]


async def test_an_earlier_waiter_takes_no_events_from_the_current_one() -> None:
    bulletin = Bulletin()
    lost = asyncio.create_task(bulletin.after(0, 5))
    await asyncio.sleep(0)
    again = asyncio.create_task(bulletin.after(0, 5))
    await asyncio.sleep(0)
    bulletin.put(update(1, 5))
    assert await lost == await again == (1, [update(1, 5)])
