"""Runs a stand-in for a dead HAProxy until Serve has started a new one, which takes seconds.

It has the same configuration but no admin socket, so Serve notices the death; Serve's new HAProxy
takes over its ports (-sf).
"""

import math
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffray.cluster.serve.address import Server
from diffray.cluster.serve.haproxy import STAND_IN

_PERIOD_S = 0.2
_START_S = 10.0  # for a stand-in to listen, or to end because its ports are taken


@contextmanager
def standing_in(server: Server) -> Iterator[None]:
    """Watch the port of the HAProxy that this process's Ray runs, if any, within the block."""
    if server.address is not None or os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        yield
        return
    folder = Path(os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host), server.port
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(folder, address, ended), daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(folder: Path, address: tuple[str, int], ended: threading.Event) -> None:
    starting: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[bytes]] = []  # they may still finish answers after handing over
    next_start = math.inf  # Serve starts the first HAProxy itself
    while not ended.wait(_PERIOD_S):
        if _is_listening(address):
            next_start = 0
            if starting is not None:
                started.append(starting)
                starting = None
        elif time.monotonic() >= next_start:
            _end(starting)
            starting = _start(folder)
            next_start = time.monotonic() + _START_S
    for stand_in in (*started, starting):
        _end(stand_in)
    for note in folder.glob(f"*/{STAND_IN}"):
        note.unlink()


def _is_listening(address: tuple[str, int]) -> bool:
    """Return whether the port accepts connections, even slowly."""
    try:
        socket.create_connection(address, timeout=5).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def _start(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start a stand-in that ends with this process: its shell reads stdin until that closes."""
    config = folder / "stand-in.cfg"
    with suppress(OSError):
        for file in folder.glob("*/haproxy.cfg"):
            lines = file.read_text().splitlines(keepends=True)
            config.write_text("".join(line for line in lines if "stats socket" not in line))
            command = shlex.join([str(folder / "haproxy"), "-dR", "-db", "-f", str(config)])
            note = shlex.quote(str(file.parent / STAND_IN))
            return subprocess.Popen(
                ["sh", "-c", f"{command} & echo $! > {note}; read _; kill -9 $!; wait"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # not affected by Ctrl-C
            )
    return None


def _end(stand_in: subprocess.Popen[bytes] | None) -> None:
    """End a stand-in if it has not exited; until then its shell keeps its pid in use."""
    if stand_in is not None and stand_in.stdin:
        stand_in.stdin.close()
        stand_in.wait()
