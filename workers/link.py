"""A rank's end of the control channel: length-prefixed msgpack frames over one TCP connection.

A frame cannot carry code; the first one carries the worker group's secret.
"""

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final, Self

from msgspec import msgpack

from diffray.workers.messages import Hello, Reply, Round, WireRequest

HEADER = struct.Struct("!I")
LARGEST = 1 << 28  # bytes of a frame

# str: the error it ends with; list: lines to announce; None: a heartbeat
FromRank = Reply | str | list[str] | None

hello_decoder: Final = msgpack.Decoder(Hello)
rank_decoder: Final = msgpack.Decoder(FromRank)
_round_decoder: Final = msgpack.Decoder(Round[WireRequest] | None)
_encode: Final = msgpack.Encoder().encode


def encode(message: Hello | FromRank | Round[WireRequest]) -> bytes:
    """Return a message as a frame."""
    body = _encode(message)
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return how many bytes follow a header; refuse lengths that no diffray process sends."""
    length = int(HEADER.unpack(header)[0])
    if length > LARGEST:
        raise ConnectionError(f"a control frame of {length} bytes; the peer is not diffray")
    return length


class Link:
    """A blocking connection to the coordinator."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()
        self._reader = connection.makefile("rb")

    @classmethod
    def connect(cls, host: str, port: int, secret: bytes, rank: int) -> Self:
        """Connect and identify this rank."""
        connection = socket.create_connection((host, port), timeout=30)
        connection.settimeout(None)
        link = cls(connection)
        link.send(Hello(rank, secret))
        return link

    def send(self, message: Hello | FromRank) -> None:
        with self._sending:
            self._socket.sendall(encode(message))

    def keep_alive(self, every: float) -> None:
        """Send heartbeats at this interval from a thread, even while a round takes long."""
        threading.Thread(target=self._beat, args=[every], name="heartbeat", daemon=True).start()

    def receive(self) -> Round[WireRequest] | None:
        """Wait for the next round; None: there are no more."""
        order: Round[WireRequest] | None = _round_decoder.decode(
            self._read(body_length(self._read(HEADER.size)))
        )
        return order

    def _beat(self, every: float) -> None:
        with suppress(OSError):  # `receive` reports that the connection is closed
            while True:
                self.send(None)
                time.sleep(every)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            raise ConnectionError("the coordinator has gone away")
        return data
