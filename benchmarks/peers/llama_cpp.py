"""Compares an autoregressive GGUF model with llama.cpp: processor seconds of steps, in turns.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python -m benchmarks.peers.llama_cpp SmolLM2-135M-Instruct.Q4_1.gguf \\
        --library package/bins/linux-x64
    python -m benchmarks.peers.llama_cpp demo-chat --prompts 20 --tokens 128 \\
        --library package/bins/linux-x64

Each side runs in a process of its own with one thread: a prompt for every sequence of a batch, then
greedy tokens, whose time counts. Of demo-chat also without drafts, one token after the other.
llama.cpp is called through ctypes, without its headers: what is passed by value is larger than its
own structures, which is harmless for a last argument.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import paired
from benchmarks.peers.table import OURS, System, compare
from diffray.cluster.cli.datasets import read_rows
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.checkpoints.demos import CHAT, smollm2
from diffray.components.checkpoints.folder import resolve

PEER: Final = "llama.cpp"
ONE_BY_ONE: Final = f"{OURS}, one token at a time"
PROMPT: Final = 64  # tokens
Prompts = list[list[int]]
Answered = tuple[float, list[list[int]], int]  # seconds, tokens of each sequence, steps


class Params(ctypes.Structure):
    """llama_model_params, or llama_context_params, which begins with these."""

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("others", ctypes.c_uint32 * 124),
    ]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class LlamaCpp:
    """A model of llama.cpp, and a context with some sequences."""

    def __init__(self, folder: Path, model: str) -> None:
        libraries = {}
        for name in ("ggml-base", "ggml", "llama"):
            (file,) = {each.resolve() for each in folder.glob(f"lib{name}.*so*")}
            libraries[name] = ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
        libraries["ggml"].ggml_backend_load_all_from_path(str(folder).encode())
        self.api: Any = libraries["llama"]
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda level, text, data: None
        )
        self._declare()
        self.api.llama_log_set(self.quiet, None)
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(
            model.encode(), self.api.llama_model_default_params()
        )
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.context: int | None = None

    def read(self, prompts: list[list[int]], tokens: int) -> list[int]:
        """Read prompts in a new context; return the first token after each."""
        if self.context is not None:
            self.api.llama_free(self.context)
        params = self.api.llama_context_default_params()
        params.n_seq_max = len(prompts)
        params.n_ctx = len(prompts) * (max(map(len, prompts)) + tokens + 256)
        self.context = self.api.llama_init_from_model(self.model, params)
        self.api.llama_set_n_threads(self.context, 1, 1)
        self.at, self.last = [len(prompt) for prompt in prompts], list[int]()
        for number, prompt in enumerate(prompts):
            self._decode(
                [(token, at, number) for at, token in enumerate(prompt)], {len(prompt) - 1}
            )
            self.last.append(self._best(len(prompt) - 1))
        return self.last

    def _declare(self) -> None:
        pointer, api = ctypes.c_void_p, self.api
        api.llama_model_default_params.restype = api.llama_context_default_params.restype = Params
        for name, *arguments in (
            ("llama_model_load_from_file", ctypes.c_char_p, Params),
            ("llama_init_from_model", pointer, Params),
            ("llama_model_get_vocab", pointer),
        ):
            function = getattr(api, name)
            function.restype, function.argtypes = pointer, arguments
        api.llama_vocab_n_tokens.argtypes = [pointer]
        api.llama_free.argtypes = [pointer]
        api.llama_set_n_threads.argtypes = [pointer, ctypes.c_int32, ctypes.c_int32]
        api.llama_batch_init.restype = Batch
        api.llama_batch_free.argtypes = [Batch]
        api.llama_decode.argtypes = [pointer, Batch]
        api.llama_get_logits_ith.argtypes = [pointer, ctypes.c_int32]
        api.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)

    def step(self) -> list[int]:
        rows = range(len(self.last))
        self._decode([(self.last[row], self.at[row], row) for row in rows], {*rows})
        self.at = [at + 1 for at in self.at]
        self.last = [self._best(row) for row in rows]
        return self.last

    def _decode(self, tokens: list[tuple[int, int, int]], read: Container[int]) -> None:
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i in read
        assert self.api.llama_decode(self.context, batch) == 0, "llama_decode failed"
        self.api.llama_batch_free(batch)

    def _best(self, row: int) -> int:
        import numpy

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax())


def theirs(args: argparse.Namespace, groups: list[Prompts], end: int | None) -> Iterator[Answered]:
    """Yield the seconds of the steps after each group's prompts, the tokens, and the steps."""
    peer = LlamaCpp(args.library.resolve(), args.file)
    for prompts in groups:
        found = [[token] for token in peer.read(prompts, args.tokens)]
        begin = time.process_time()
        while len(found[0]) < args.tokens and not (end is not None and found[0][-1] == end):
            for row, token in zip(found, peer.step(), strict=True):
                row.append(token)
        yield time.process_time() - begin, found, len(found[0]) - 1


def ours(args: argparse.Namespace, groups: list[Prompts], end: int | None) -> Iterator[Answered]:
    """Yield the same of an engine."""
    from diffray.components.mesh import Mesh
    from diffray.components.params import SamplingParams
    from diffray.workers.engine_options import EngineOptions
    from diffray.workers.messages import Request
    from diffray.workers.setup import build_rank

    options = EngineOptions(dtype="float32", device="cpu", max_num_seqs=len(groups[0]))
    engine = build_rank(args.model, options, Mesh())
    diffusion = {} if args.side == OURS else {"iteration": "autoregressive"}
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=end is None, diffusion=diffusion)
    for prompts in groups:
        found: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            engine.add(Request(number, tuple(prompt), params))
        begin = forwards = 0.0
        while not engine.idle:
            if all(found):
                begin, forwards = begin or time.process_time(), forwards + 1
            for update in engine.step(1):
                found[update.uid] += update.ids
        yield time.process_time() - begin, found, int(forwards)


def turn(args: argparse.Namespace, side: str, batch: int, _: int) -> paired.Turn:
    """Run a side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.llama_cpp", args.model, "--side", side]
    command += ["--library", str(args.library), "--batch", str(batch), "--tokens", str(args.tokens)]
    command += ["--prompts", str(args.prompts)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    if made.returncode:
        raise RuntimeError(f"{side}: {made.stderr[-400:]}")
    return paired.Turn(*json.loads(made.stdout.splitlines()[-1]))


def run_side(args: argparse.Namespace) -> None:
    """Print the processor seconds of the steps, the tokens after the first, and the steps."""
    groups, end = [[[*range(100 + n, 100 + n + PROMPT)] for n in range(args.batch[0])]], None
    if args.prompts:
        tokenizer = Tokenizer.load(resolve(args.model), -1)
        assert tokenizer is not None
        rows = read_rows("chat", None, args.prompts)
        asked = [tokenizer.encode_chat([{"role": "user", "content": row.prompt}]) for row in rows]
        groups, end = [[ids] for ids in asked], tokenizer.fast.eos_token_id
    answered = [*(theirs if args.side == PEER else ours)(args, groups, end)]
    seconds, steps = sum(each[0] for each in answered), [each[2] for each in answered]
    print(json.dumps([seconds, [row[1:] for _, found, _ in answered for row in found], steps]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a GGUF file, or demo-chat")
    parser.add_argument("--library", type=Path, required=True, help="the folder of libllama")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", type=int, default=0, help="of the data set chat, one by one")
    parser.add_argument("--tokens", type=int, default=48, help="the most of a sequence")
    parser.add_argument("--repeats", type=int, default=3, help="turns, after one that warms up")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.file = str(smollm2()) if args.model == CHAT else args.model
    if args.side:
        return run_side(args)
    sides = [OURS, ONE_BY_ONE] if args.model == CHAT else [OURS]
    for batch in [1] if args.prompts else args.batch:
        systems = [System(n, partial(turn, args, n, batch)) for n in (*sides, PEER)]
        work = f"{args.prompts} prompts one by one" if args.prompts else f"{batch} sequences"
        compare(f"{work}, one thread, processor seconds", systems, args.repeats)


if __name__ == "__main__":
    main()
