"""The servers: how each is started and stopped, and what its requests hold."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks.peers.environments import Environment
from benchmarks.serve_process import free_port, serve_process

LOAD_S = 300.0
OURS = "diffray"


class Setting(NamedTuple):
    """What all servers have in common."""

    model: Path
    threads: int
    gen_length: int
    steps: int
    batch: int


class Recipe(NamedTuple):
    """How a peer's server is started, its readiness path, and its name for the model."""

    command: tuple[str, ...]
    ready: str
    served: str
    variables: dict[str, str]


class Contender(NamedTuple):
    """A server and the fields of its requests; `same`: whether its algorithm is the peers'."""

    name: str
    server: str
    body: dict[str, Any]
    same: bool = True


class Server(NamedTuple):
    """A running server, its name for the model, and its process group if that can be stopped."""

    url: str
    served: str
    group: int | None = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run only in the `with` block: dlmserve polls a thousand times a second."""
        if self.group:
            os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            if self.group:
                os.killpg(self.group, signal.SIGSTOP)


def process_variables(threads: int) -> dict[str, str]:
    """Return a peer's environment; without TORCHDYNAMO_DISABLE every length would be compiled."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def flags(options: dict[str, object]) -> tuple[str, ...]:
    return tuple(str(word) for pair in options.items() for word in pair)


def our_flags(setting: Setting) -> tuple[str, ...]:
    options = {
        "--served-model-name": OURS,
        "--dtype": "float32",
        "--cpu-threads": setting.threads,
        "--max-num-seqs": setting.batch,
    }
    return str(setting.model), *flags(options)


def dlmserve(setting: Setting, port: int, environment: Environment) -> Recipe:
    variables = {
        "DLMSERVE_MODEL": str(setting.model),
        "DLMSERVE_DTYPE": "bf16",
        "DLMSERVE_DEVICE": "cpu",
        "DLMSERVE_LOG_LEVEL": "warning",
        "DLMSERVE_MAX_BATCH": str(setting.batch),
    }
    script = Path(__file__).with_name("start_dlmserve.py")
    command = (str(environment.python), str(script), str(port))
    variables |= process_variables(setting.threads)
    return Recipe(command, "/ready", str(setting.model), variables)


def dfastllm(setting: Setting, port: int, environment: Environment) -> Recipe:
    """Return its recipe; the rate limit is large, because 0, documented as off, refuses all."""
    options = {
        "--model": setting.model,
        "--served-model-name": "dfastllm",
        "--dtype": "float32",
        "--host": "127.0.0.1",
        "--port": port,
        "--diffusion-steps": setting.steps,
        "--apd-max-parallel": max(8, -(-setting.gen_length // setting.steps)),
        "--rate-limit-requests": 1_000_000,
        "--uvicorn-log-level": "warning",
    }
    module = ("-m", "dfastllm.entrypoints.openai.api_server", "--trust-remote-code")
    command = (str(environment.python), *module, *flags(options))
    return Recipe(command, "/health", "dfastllm", process_variables(setting.threads))


RECIPES = {"dlmserve": dlmserve, "dfastllm": dfastllm}


def contenders(setting: Setting, peers: list[str], block_length: int) -> list[Contender]:
    """Return diffray twice, decoding as the peers do and with a cache, and the peers."""
    steps, length = setting.steps, setting.gen_length

    def diffusion(block: int, cache: str) -> dict[str, Any]:
        return {
            "diffusion": {
                "iteration": {"kind": "blockwise"},
                "decoder": {"kind": "fixed", "steps": steps},
                "cache": {"kind": cache},
                "block_length": block,
                "canvas": "fixed",
            }
        }

    bodies: dict[str, dict[str, Any]] = {
        "dlmserve": {"num_denoising_steps": steps, "block_length": length},
        "dfastllm": {},
    }
    return [
        Contender(OURS, OURS, diffusion(length, "none")),
        Contender(f"{OURS}, dual cache", OURS, diffusion(block_length, "dual"), same=False),
        *(Contender(name, name, bodies[name]) for name in peers),
    ]


@contextmanager
def our_server(setting: Setting) -> Iterator[Server]:
    """Run `diffray serve`. It is never stopped: Ray would take stopped processes for dead."""
    variables = {"OMP_NUM_THREADS": str(setting.threads)}
    with serve_process(*our_flags(setting), settings=variables) as server:
        server.wait_for("/v1", 1)
        yield Server(server.url, OURS)


@contextmanager
def peer_server(
    name: str, setting: Setting, environment: Environment, logs: Path
) -> Iterator[Server]:
    """Run a peer's server, stopped until it is awake; it ignores SIGTERM, so it is killed."""
    port = free_port()
    recipe = RECIPES[name](setting, port, environment)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{name}.log").open("w") as out:
        process = subprocess.Popen(
            recipe.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | recipe.variables,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", recipe.served, process.pid)
    try:
        _wait(name, process, server.url + recipe.ready, out.name)
        os.killpg(process.pid, signal.SIGSTOP)
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(name: str, process: "subprocess.Popen[bytes]", url: str, log: str) -> None:
    """Wait until a server is ready; raise if it ends first or takes too long."""
    deadline = time.monotonic() + LOAD_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ValueError(f"{name} does not start: see {log}")
        try:
            if httpx2.get(url, timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    raise ValueError(f"{name} is not ready after {LOAD_S:g} s: see {log}")
