"""Events between a coordinator and its replica, a whole issue in one piece.

Pickle, which Ray would use, takes each event by itself and three times as long.
"""

from typing import Final

from msgspec import msgpack

from diffray.cluster.control.events import Event

encode_events: Final = msgpack.Encoder().encode
decode_events: Final = msgpack.Decoder(list[Event]).decode
