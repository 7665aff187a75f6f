"""How each server is started and asked, and the process that it is."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.peers.environments import Environment

LOAD_S, STOP_S = 300.0, 60.0
OURS = "diffray"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all servers have in common."""

    model: Path
    threads: int
    gen_length: int
    steps: int
    batch: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one server is started, where it says that it is ready, and what its name for it is."""

    name: str
    command: tuple[str, ...]
    port: int
    ready: str
    served: str
    variables: dict[str, str] = field(default_factory=dict)
    pausable: bool = True


@dataclass(frozen=True, slots=True)
class Contender:
    """A server asked in a certain way; `same` says whether its algorithm is the peers'."""

    name: str
    server: str
    body: dict[str, Any]
    same: bool = True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def our_recipe(setting: Setting, port: int) -> Recipe:
    options = {
        "--served-model-name": OURS,
        "--dtype": "float32",
        "--cpu-threads": setting.threads,
        "--max-num-seqs": setting.batch,
        "--port": port,
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = (sys.executable, "-m", "diffray", "serve", str(setting.model), *words)
    # Ray's processes take each other for dead if they are stopped.
    return Recipe(OURS, command, port, "/health", OURS, pausable=False)


def dlmserve_recipe(setting: Setting, port: int, environment: Environment) -> Recipe:
    variables = process_variables(setting.threads) | {
        "DLMSERVE_MODEL": str(setting.model),
        "DLMSERVE_DTYPE": "bf16",
        "DLMSERVE_DEVICE": "cpu",
        "DLMSERVE_LOG_LEVEL": "warning",
        "DLMSERVE_MAX_BATCH": str(setting.batch),
    }
    script = Path(__file__).with_name("start_dlmserve.py")
    command = (str(environment.python), str(script), str(port))
    served = str(setting.model)
    return Recipe("dlmserve", command, port, "/ready", served, variables)


def dfastllm_recipe(setting: Setting, port: int, environment: Environment) -> Recipe:
    """Its rate limit takes a large number: 0, told to turn it off, refuses every request."""
    share = -(-setting.gen_length // setting.steps)
    options = {
        "--model": setting.model,
        "--served-model-name": "dfastllm",
        "--dtype": "float32",
        "--host": "127.0.0.1",
        "--port": port,
        "--diffusion-steps": setting.steps,
        "--apd-max-parallel": max(8, share),
        "--rate-limit-requests": 1_000_000,
        "--uvicorn-log-level": "warning",
    }
    words = [str(word) for pair in options.items() for word in pair]
    variables = process_variables(setting.threads)
    module = "dfastllm.entrypoints.openai.api_server"
    command = (str(environment.python), "-m", module, "--trust-remote-code", *words)
    return Recipe("dfastllm", command, port, "/health", "dfastllm", variables)


def process_variables(threads: int) -> dict[str, str]:
    """Return a peer's variables: compiling attention for every length anew only slows it."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def contenders(setting: Setting, peers: list[str], block_length: int) -> list[Contender]:
    """Return ours twice, as the peers decode and with a cache, and the peers."""
    steps, length = setting.steps, setting.gen_length

    def diffusion(block: int, cache: str) -> dict[str, Any]:
        return {
            "diffusion": {
                "iteration": {"kind": "blockwise"},
                "decoder": {"kind": "fixed", "steps": steps},
                "cache": {"kind": cache},
                "block_length": block,
            }
        }

    found = [
        Contender(OURS, OURS, diffusion(length, "none")),
        Contender(f"{OURS}, dual cache", OURS, diffusion(block_length, "dual"), same=False),
    ]
    bodies: dict[str, dict[str, Any]] = {
        "dlmserve": {"num_denoising_steps": steps, "block_length": length},
        "dfastllm": {},
    }
    return found + [Contender(name, name, bodies[name]) for name in peers]


class Running:
    """A server's process, in a group of its own, that writes what it says into a file."""

    def __init__(self, recipe: Recipe, logs: Path) -> None:
        self.recipe, self.log = recipe, logs / f"{recipe.name}.log"
        logs.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                recipe.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | recipe.variables,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.recipe.port}"

    def wait(self) -> None:
        """Return when it is ready; raise where it ends before, or takes too long."""
        deadline = time.monotonic() + LOAD_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ValueError(f"{self.recipe.name} does not start: see {self.log}")
            try:
                if httpx2.get(self.url + self.recipe.ready, timeout=5).status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(0.5)
        raise ValueError(f"{self.recipe.name} is not ready after {LOAD_S:g} s: see {self.log}")

    def pause(self) -> None:
        """Keep it from running while others are measured: dlmserve polls a thousand times a second.

        A server that cannot be stopped so only idles.
        """
        if self.recipe.pausable:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.recipe.pausable:
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it: politely if it is ours; the peers stay after SIGTERM."""
        if self._process.poll() is None and not self.recipe.pausable:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                print(f"{self.recipe.name} has not ended in {STOP_S:g} s: killed", file=sys.stderr)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def running(recipes: list[Recipe], logs: Path) -> Iterator[dict[str, Running]]:
    """Start servers one after the other, and end them whatever happens."""
    started: dict[str, Running] = {}
    try:
        for recipe in recipes:
            print(f"starting {recipe.name}", file=sys.stderr)
            started[recipe.name] = server = Running(recipe, logs)
            server.wait()
            server.pause()
        yield started
    finally:
        for server in started.values():
            server.stop()
