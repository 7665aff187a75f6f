"""The coordinator's port: open to its ranks alone, until all are there; and their heartbeats."""

import asyncio
import time
from contextlib import suppress

import pytest

from diffray.cluster.control.rank_channel import Failure, Pulse, RankChannel, answered
from diffray.workers.link import HEADER, Link, encode
from diffray.workers.messages import Hello, Reply, Round, WireRequest
from diffray.workers.stats import Stats

PATIENCE_S = 60.0  # on a machine that does other things too
SECRET = b"s" * 32


async def test_a_stranger_says_little_and_is_sent_away() -> None:
    channel = RankChannel(1, SECRET, 5.0, print)
    port = await channel.listen("127.0.0.1")
    for said in (HEADER.pack(1 << 20), encode(Hello(0, b"x" * 32)), encode(None)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        writer.close()
    assert not channel.complete.is_set()
    await channel.close()


async def connected(channel: RankChannel, beats: dict[int, float]) -> list[Link]:
    """Connect ranks, which give a sign of life so often; those with 0 give none."""
    port, links = await channel.listen("127.0.0.1"), []
    for rank, every in beats.items():
        links.append(await asyncio.to_thread(Link.connect, "127.0.0.1", port, SECRET, rank))
        if every:
            links[-1].keep_alive(every)
    await asyncio.wait_for(channel.complete.wait(), PATIENCE_S)
    with pytest.raises(ConnectionError):  # the port is closed once all ranks are there
        await asyncio.open_connection("127.0.0.1", port)
    return links


async def test_ranks_get_orders_and_answer_them() -> None:
    channel = RankChannel(2, SECRET, 5.0, print)
    links = await connected(channel, {0: 0.1, 1: 0.1})
    order: Round[WireRequest] = Round(1, [], [], 4)
    channel.broadcast(order)
    reply = Reply(1, 4, [], [], Stats())
    for link in links:
        assert await asyncio.to_thread(link.receive) == order
        link.send(reply)
    for _ in links:
        assert await asyncio.wait_for(channel.messages.get(), PATIENCE_S) == reply
    await channel.close()


async def test_a_rank_without_heartbeats_hangs_and_one_that_only_works_long_does_not() -> None:
    channel = RankChannel(2, SECRET, 0.6, print)
    links = await connected(channel, {0: 0.1, 1: 0})
    begin = time.monotonic()
    lost = await asyncio.wait_for(channel.messages.get(), PATIENCE_S)
    assert isinstance(lost, Failure)
    assert "rank 1 sent no heartbeat for 0.6 s" in lost.error
    await asyncio.sleep(1.2)
    assert channel.messages.empty(), "rank 0 has not answered anything, but it lives"
    links[0].send(reply := Reply(1, 4, [], [], Stats()))
    assert await asyncio.wait_for(channel.messages.get(), PATIENCE_S) == reply
    await channel.close()
    assert time.monotonic() - begin > 1.8


async def test_lines_are_announced_in_their_order_and_loading_may_be_silent_for_longer() -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    channel = RankChannel(1, SECRET, 6.0, lines.put_nowait)
    (link,) = await connected(channel, {0: 0})
    link.send(["one", "two"])
    link.send(["three"])
    found = [await asyncio.wait_for(lines.get(), PATIENCE_S) for _ in range(3)]
    assert found == ["one", "two", "three"]
    await asyncio.sleep(0.5)
    assert channel.messages.empty(), "what is announced is not a reply"
    channel.expect_within(0.3)
    lost = await asyncio.wait_for(channel.messages.get(), PATIENCE_S)
    assert isinstance(lost, Failure) and lost.dead
    await channel.close()


async def test_a_watcher_that_was_suspended_assumes_no_rank_hung() -> None:
    """What others sent meanwhile is read a moment after it resumes."""

    async def late() -> str:
        await asyncio.sleep(1.1)
        return "here"

    pulse = Pulse("rank 0", 0.6)
    lost = asyncio.create_task(pulse.stops())
    answer = asyncio.create_task(answered(late(), 0.6))
    await asyncio.sleep(0.05)
    time.sleep(1.0)  # this process is stopped, the others are not
    await asyncio.sleep(0.2)
    assert not lost.done()
    assert await answer == "here"
    pulse.beat()
    await asyncio.sleep(0.3)
    assert not lost.done()
    await asyncio.wait_for(lost, PATIENCE_S)
    with pytest.raises(TimeoutError, match=r"no heartbeat for 0\.1 s"):
        await answered(late(), 0.1)
