"""Compares an autoregressive GGUF model with llama.cpp: processor seconds of a step, in turns.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python -m benchmarks.peers.llama_cpp SmolLM2-135M-Instruct.Q4_1.gguf \\
        --library package/bins/linux-x64

Each side runs in a process of its own with one thread: a prompt for every sequence of a batch, then
one greedy token after the other. llama.cpp is called through ctypes, without its headers: what is
passed by value is larger than its own structures, which is harmless for a last argument.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import paired
from benchmarks.peers.table import OURS, System, compare

PROMPT = 64  # tokens
Step = Callable[[], list[int]]  # returns a token of each sequence


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
    """A context of llama.cpp with some sequences."""

    def __init__(self, folder: Path, model: str, prompts: list[list[int]], tokens: int) -> None:
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
        loaded = self.api.llama_model_load_from_file(
            model.encode(), self.api.llama_model_default_params()
        )
        params = self.api.llama_context_default_params()
        params.n_seq_max = len(prompts)
        params.n_ctx = len(prompts) * (PROMPT + tokens + 256)
        self.context = self.api.llama_init_from_model(loaded, params)
        self.api.llama_set_n_threads(self.context, 1, 1)
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(loaded))
        self.at = PROMPT
        self.last: list[int] = []
        for number, prompt in enumerate(prompts):
            self._decode([(token, at, number) for at, token in enumerate(prompt)])
            self.last.append(self._best(PROMPT - 1))

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
        api.llama_set_n_threads.argtypes = [pointer, ctypes.c_int32, ctypes.c_int32]
        api.llama_batch_init.restype = Batch
        api.llama_batch_free.argtypes = [Batch]
        api.llama_decode.argtypes = [pointer, Batch]
        api.llama_get_logits_ith.argtypes = [pointer, ctypes.c_int32]
        api.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)

    def step(self) -> list[int]:
        self._decode([(token, self.at, number) for number, token in enumerate(self.last)])
        self.at += 1
        self.last = [self._best(number) for number in range(len(self.last))]
        return self.last

    def _decode(self, tokens: list[tuple[int, int, int]]) -> None:
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i + 1 == len(tokens) or position >= PROMPT
        assert self.api.llama_decode(self.context, batch) == 0, "llama_decode failed"
        self.api.llama_batch_free(batch)

    def _best(self, row: int) -> int:
        import numpy

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax())


def ours(model: str, prompts: list[list[int]], tokens: int) -> Step:
    """Read the prompts, and return what returns the next tokens."""
    from diffray.components.mesh import Mesh
    from diffray.components.params import SamplingParams
    from diffray.workers.engine_options import EngineOptions
    from diffray.workers.messages import Request
    from diffray.workers.setup import build_rank

    options = EngineOptions(dtype="float32", device="cpu", max_num_seqs=len(prompts))
    engine = build_rank(model, options, Mesh())
    diffusion = {"iteration": "autoregressive"}
    params = SamplingParams(max_tokens=tokens + 2, ignore_eos=True, diffusion=diffusion)
    for number, prompt in enumerate(prompts):
        engine.add(Request(number, tuple(prompt), params))

    def step() -> list[int]:
        found: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
        while not all(found.values()):
            for update in engine.step(1):
                found[update.uid] += update.ids
        return [ids[-1] for ids in found.values()]

    step()  # the prompts
    return step


def turn(args: argparse.Namespace, side: str, batch: int, _: int) -> paired.Turn:
    """Run a side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.llama_cpp", args.model, "--side", side]
    command += ["--library", str(args.library), "--batch", str(batch), "--tokens", str(args.tokens)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    if made.returncode:
        raise RuntimeError(f"{side}: {made.stderr[-400:]}")
    return paired.Turn(*json.loads(made.stdout.splitlines()[-1]))


def run_side(args: argparse.Namespace) -> None:
    """Print the processor seconds of the steps, and each sequence's tokens."""
    prompts = [[*range(100 + n, 100 + n + PROMPT)] for n in range(args.batch[0])]
    if args.side == OURS:
        step = ours(args.model, prompts, args.tokens)
    else:
        step = LlamaCpp(args.library.resolve(), args.model, prompts, args.tokens).step
    begin = time.process_time()
    ids = [step() for _ in range(args.tokens)]
    seconds = time.process_time() - begin
    print(json.dumps([seconds, [*zip(*ids, strict=True)]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--library", type=Path, required=True, help="the folder of libllama")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3, help="turns, after one that warms up")
    parser.add_argument("--side", choices=(OURS, "llama.cpp"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return run_side(args)
    for batch in args.batch:
        systems = [System(n, partial(turn, args, n, batch)) for n in (OURS, "llama.cpp")]
        compare(f"{batch} sequences, one thread, processor seconds", systems, args.repeats)


if __name__ == "__main__":
    main()
