"""Compares `diffray serve` with dlmserve and dfastllm: one client sends all the same prompts.

The checkpoint is a random LLaDA with its own vocabulary, since both peers have LLaDA's mask id
built in. Every ordinary id is a word of its own, so that an answer's text shows its tokens.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks import load, paired
from benchmarks.peers.offline import BLOCK_LENGTH, put_code
from benchmarks.peers.table import OURS, System, environment, variables
from benchmarks.peers.table import compare as compare_systems
from benchmarks.random_checkpoint import Shape, config_of, write
from tools.serve_process import free_port, serve_process

VOCAB, ORDINARY = 126464, 126080
END_ID, MASK_ID = 126081, 126336
SPECIAL = {END_ID: "<|endoftext|>", MASK_ID: "<|mdm_mask|>"}
LLADA_CODE = {
    "AutoConfig": "configuration_llada.LLaDAConfig",
    "AutoModel": "modeling_llada.LLaDAModelLM",
    "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
}
CACHED = f"{OURS}, dual cache"
LOAD_S, READY = 300.0, {"dlmserve": "/ready", "dfastllm": "/health"}


class Server(NamedTuple):
    """A running server, its name for the model, and its process group if that can be stopped."""

    url: str
    model: str
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


def compare(codes: dict[str, Path], args: argparse.Namespace, clock: paired.Clock) -> None:
    """Start the servers and compare them at each concurrency."""
    length = args.gen_length or 64
    if args.cpu_time or length % args.steps:
        raise ValueError("servers need wall clock time, and --gen-length a multiple of --steps")
    model = args.folder.resolve() / f"llada-{args.hidden}x{args.layers}-{args.seed}"
    if not (model / "tokenizer_config.json").is_file():
        write_llada(model, next(iter(codes.values())), args.layers, args.hidden, args.seed)
    with ExitStack() as stack:
        running = {OURS: stack.enter_context(our_server(model, args))}
        for name in codes:
            running[name] = stack.enter_context(peer_server(name, model, args))
        for at_once in args.concurrency:
            texts = prompts(max(4, at_once), args)
            systems = []
            for name, body in requests(length, args.steps).items():
                if (server := running.get(name.partition(",")[0])) is not None:
                    take = sender(name, server, body, texts, at_once, length)
                    systems.append(System(name, take, same=name != CACHED))
            work = f"{model.name}, {length} tokens in {args.steps} steps, concurrency {at_once}"
            compare_systems(work, systems, args.repeats)


def requests(length: int, steps: int) -> dict[str, load.Json]:
    """Return what each system is asked beside the prompt: the same steps in one block.

    With a cache diffray takes them in several blocks. dlmserve refuses unknown fields.
    """

    def diffusion(block: int, cache: str) -> load.Json:
        parts = {"iteration": {"kind": "blockwise"}, "decoder": {"kind": "fixed", "steps": steps}}
        more = {"cache": {"kind": cache}, "block_length": block, "canvas": "fixed"}
        return {"diffusion": parts | more}

    return {
        OURS: diffusion(length, "none"),
        CACHED: diffusion(BLOCK_LENGTH, "dual"),
        "dlmserve": {"num_denoising_steps": steps, "block_length": length},
        "dfastllm": {},
    }


def prompts(count: int, args: argparse.Namespace) -> list[str]:
    """Return ragged prompts of random words."""
    draws, lengths = random.Random(args.seed), args.prompt_length or (24, 40)
    return [
        " ".join(word(draws.randrange(ORDINARY)) for _ in range(draws.randint(*lengths)))
        for _ in range(count)
    ]


def sender(
    name: str, server: Server, more: load.Json, texts: list[str], at_once: int, length: int
) -> Callable[[int], paired.Turn]:
    """Return a contender that sends all prompts, and raises if an answer has another length."""
    body = {"model": server.model, "max_tokens": length, "temperature": 0.0} | more
    bodies = [body | {"messages": [{"role": "user", "content": text}]} for text in texts]

    def take(_: int) -> paired.Turn:
        with server.awake():
            begin = time.perf_counter()
            try:
                replies = load.answers(server.url, bodies, at_once, load.streamed)
            except (ValueError, httpx2.HTTPError) as error:
                raise ValueError(f"{name} does not answer: {error}") from None
            seconds = time.perf_counter() - begin
        answers = [reply.text.split() for reply in replies]
        if wrong := [len(words) for words in answers if len(words) != length]:
            raise ValueError(f"{name} wrote {wrong} tokens instead of {length}")
        return paired.Turn(seconds, answers)

    return take


@contextmanager
def our_server(model: Path, args: argparse.Namespace) -> Iterator[Server]:
    """Run `diffray serve`. It is never stopped: Ray would take stopped processes for dead."""
    flags = f"--served-model-name {OURS} --dtype float32 --cpu-threads {args.threads}"
    flags += f" --max-num-seqs {max(args.concurrency)}"
    variables = {"OMP_NUM_THREADS": str(args.threads)}
    with serve_process(str(model), *flags.split(), settings=variables) as server:
        server.wait_for("/v1", 1)
        yield Server(server.url, OURS)


def arguments_of(name: str, model: Path, port: int, args: argparse.Namespace) -> list[str]:
    """Return the arguments that a peer's Python gets; dlmserve also reads `variables`."""
    if name == "dlmserve":
        return [str(Path(__file__).with_name("start_dlmserve.py")), str(port)]
    # The rate limit is large, because 0, documented as off, refuses all.
    flags = f"--model {model} --served-model-name {model} --dtype float32 --host 127.0.0.1"
    flags += f" --port {port} --diffusion-steps {args.steps} --rate-limit-requests 1000000"
    flags += f" --apd-max-parallel {max(8, (args.gen_length or 64) // args.steps)}"
    flags += " --trust-remote-code --uvicorn-log-level warning"
    return ["-m", "dfastllm.entrypoints.openai.api_server", *flags.split()]


@contextmanager
def peer_server(name: str, model: Path, args: argparse.Namespace) -> Iterator[Server]:
    """Run a peer's server, stopped until it is awake; it ignores SIGTERM, so it is killed."""
    port, python = free_port(), environment(args.folder, name)
    own = {"DLMSERVE_MODEL": str(model), "DLMSERVE_DTYPE": "bf16", "DLMSERVE_DEVICE": "cpu"}
    own |= {"DLMSERVE_MAX_BATCH": str(max(args.concurrency))}
    with (args.folder / f"{name}.log").open("w") as out:
        process = subprocess.Popen(
            [str(python), *arguments_of(name, model, port, args)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | own | variables(args.threads),
            start_new_session=True,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LOAD_S
    try:
        while not answers(url + READY[name]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"{name} does not start: see {out.name}")
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGSTOP)
        yield Server(url, str(model), process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def write_llada(folder: Path, code: Path, layers: int, hidden: int, seed: int) -> None:
    """Write a random LLaDA with its own vocabulary, in bfloat16: dlmserve cannot read float32.

    Widened, the weights are the same in all systems. Special ids are never the best, so every
    answer has its full length.
    """
    heads = hidden // 64
    shape = Shape(hidden, layers, heads, kv_heads=heads, mlp=hidden * 14 // 5, vocab=VOCAB)
    ids = {"mask_token_id": MASK_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    config = config_of("llada", shape) | ids
    write(folder, config, seed=seed, dtype=torch.bfloat16, never=slice(ORDINARY, VOCAB))
    put_code(folder, code, LLADA_CODE)
    vocabulary = {word(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {  # written by hand, because peers run another version of transformers
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END_ID],
        "pad_token": SPECIAL[END_ID],
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def word(token: int) -> str:
    return SPECIAL.get(token, f"w{token}" if token < ORDINARY else f"<|reserved_{token}|>")
