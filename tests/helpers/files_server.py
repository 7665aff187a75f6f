"""A server of files on 127.0.0.1, and of answers that no client should wait for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ssl import SSLContext
from time import sleep

from tests.helpers.http_server import Handler, listening


@contextmanager
def files_server(
    files: Mapping[str, bytes],
    moved: Mapping[str, str] | None = None,
    endless: Mapping[str, float] | None = None,
    seen: list[str] | None = None,
    tls: SSLContext | None = None,
) -> Iterator[str]:
    """Serve files, redirects, and endless kilobytes with pauses; `seen` takes the Host headers."""

    class Files(Handler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if seen is not None:
                seen.append(str(self.headers["Host"]))
            if moved is not None and path in moved:
                self.say(302, b"", Location=moved[path])
            elif endless is not None and path in endless:
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):  # until the client has enough
                    for _ in range(10_000):
                        self.wfile.write(bytes(1024))
                        sleep(endless[path])
            elif path in files:
                self.say(200, files[path])
            else:
                self.send_error(404)

    with listening(Files, tls) as port:
        yield f"http{'s' * (tls is not None)}://127.0.0.1:{port}"
