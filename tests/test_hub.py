"""The coordinator's door: open to its ranks alone, and only until all of them are there."""

import asyncio

import pytest

from diffray.cluster.hub import Hub
from diffray.workers.link import HEADER, encode

SECRET = b"s" * 32


async def closed_within(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Whether the other end hangs up so soon, having said nothing."""
    try:
        return await asyncio.wait_for(reader.read(), seconds) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_a_stranger_says_little_and_is_sent_away() -> None:
    async def run() -> None:
        hub = Hub(1, SECRET)
        port = await hub.listen("127.0.0.1")
        for said in (HEADER.pack(1 << 20), encode({"rank": 0, "secret": b"x" * 32}), encode(7)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            assert await closed_within(reader, 2)
            writer.close()
        assert not hub.complete.is_set()
        await hub.close()

    asyncio.run(run())


def test_the_door_is_shut_once_all_ranks_are_there() -> None:
    async def run() -> None:
        hub = Hub(2, SECRET)
        port = await hub.listen("127.0.0.1")
        ranks = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for rank, (_, writer) in enumerate(ranks):
            writer.write(encode({"rank": rank, "secret": SECRET}))
        await asyncio.wait_for(hub.complete.wait(), 5)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        hub.broadcast({"number": 1})
        for reader, writer in ranks:
            assert await reader.readexactly(4) == HEADER.pack(len(encode({"number": 1})) - 4)
            writer.write(encode({"heard": 1}))
        for _ in ranks:
            assert await asyncio.wait_for(hub.messages.get(), 5) == {"heard": 1}
        for _, writer in ranks:
            writer.close()
        await hub.close()

    asyncio.run(run())
