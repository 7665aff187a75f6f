"""llama.cpp's library through ctypes, without its headers; and a side's process of one thread.

What is passed by value is larger than the library's own structures, which is harmless for a last
argument.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from benchmarks import paired

PEER: Final = "llama.cpp"


def alone(module: str, side: str, words: list[str]) -> paired.Turn:
    """Run a side of a comparison in a process of one thread; its last line is the turn."""
    command = [sys.executable, "-m", module, *words, "--side", side]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    if made.returncode:
        raise RuntimeError(f"{side}: {made.stderr[-400:]}")
    return paired.Turn(*json.loads(made.stdout.splitlines()[-1]))


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
        self.seconds = 0.0  # of the processor, in llama_decode

    def read(self, prompts: list[list[int]], tokens: int) -> list[int]:
        """Read prompts in a new context; return the first token after each."""
        self._open(len(prompts), max(map(len, prompts)) + tokens + 256)
        self.at, self.last = [len(prompt) for prompt in prompts], list[int]()
        for number, prompt in enumerate(prompts):
            self._decode(
                [(token, at, number) for at, token in enumerate(prompt)], {len(prompt) - 1}
            )
            self.last.append(self._best(len(prompt) - 1))
        return self.last

    def look(self, ids: list[int], first: int) -> NDArray[numpy.float32]:
        """Return the logits from position `first` on; each position sees all ids."""
        if self.context is None:
            self._open(1, len(ids), at_once=len(ids))
            self.api.llama_set_causal_attn(self.context, False)
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        shown = range(first, len(ids))
        self._decode([(token, at, 0) for at, token in enumerate(ids)], shown)
        logits = self.api.llama_get_logits_ith(self.context, first)
        return numpy.ctypeslib.as_array(logits, (len(shown), self.vocab))

    def _open(self, sequences: int, length: int, at_once: int = 0) -> None:
        """Make a new context; a forward takes at least `at_once` tokens."""
        if self.context is not None:
            self.api.llama_free(self.context)
        params = self.api.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * length
        params.n_batch = max(params.n_batch, at_once)
        params.n_ubatch = max(params.n_ubatch, at_once)
        self.context = self.api.llama_init_from_model(self.model, params)
        self.api.llama_set_n_threads(self.context, 1, 1)

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
        api.llama_set_causal_attn.argtypes = [pointer, ctypes.c_bool]
        api.llama_get_memory.argtypes, api.llama_get_memory.restype = [pointer], pointer
        api.llama_memory_clear.argtypes = [pointer, ctypes.c_bool]
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
        begin = time.process_time()
        assert self.api.llama_decode(self.context, batch) == 0, "llama_decode failed"
        self.seconds += time.process_time() - begin
        self.api.llama_batch_free(batch)

    def _best(self, row: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax())
