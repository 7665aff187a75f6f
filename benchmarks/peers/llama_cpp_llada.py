"""Compares LLaDA with llama.cpp: processor seconds of denoising steps, in turns, and tokens.

    pip install gguf
    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.peers.llama_cpp_llada /tmp/llada-100m --library package/bins/linux-x64

Both sides read the same GGUF file, which is kept beside the checkpoint and has all matrices in one
type. Each runs in a process of its own with one thread: after an answer that warms up, it writes
one with LLaDA's sampler at temperature 0, in a fixed number of steps that run the whole canvas;
diffray also in blocks with the dual cache. Of diffray all of their time counts; of llama.cpp, whose
sampler is written here, only llama_decode's, which gives logits of all positions in any case.

Letters: C positions of the canvas, R masked ones, V ids.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks import paired
from benchmarks.peers.llama_cpp_library import PEER, LlamaCpp, alone
from benchmarks.peers.servers import CACHED, requests
from benchmarks.peers.table import OURS, System, compare
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank

FIRST = 100  # the prompt's first token; the next ones follow
Look = Callable[[list[int], int], NDArray[numpy.float32]]


def gguf_of(checkpoint: Path, kind: str) -> Path:
    """Return a checkpoint's GGUF file, which is written if it is missing or older."""
    weights = checkpoint / "model.safetensors"
    path = checkpoint.with_name(f"{checkpoint.name}.{kind}.gguf")
    if not path.exists() or path.stat().st_mtime < weights.stat().st_mtime:
        made = path.with_suffix(".partial")
        write_gguf(checkpoint, made, kind)
        made.rename(path)
    return path


def write_gguf(checkpoint: Path, path: Path, kind: str) -> None:
    """Write a LLaDA as llama.cpp's converter does, without a tokenizer."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llada")
    writer.add_block_count(config["n_layers"])
    writer.add_context_length(config["max_sequence_length"])
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["mlp_hidden_size"])
    writer.add_head_count(config["n_heads"])
    writer.add_head_count_kv(config["n_kv_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_causal_attention(False)
    writer.add_tokenizer_model("none")
    writer.add_mask_token_id(config["mask_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLADA, config["n_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = tensor.float().numpy()
        for part, heads in ("q_proj", config["n_heads"]), ("k_proj", config["n_kv_heads"]):
            if f".{part}." in name:  # a head's halves alternate there
                halves = array.reshape(heads, 2, -1, array.shape[-1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        form = gguf.GGMLQuantizationType[kind.upper() if array.ndim > 1 else "F32"]
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        writer.add_tensor(theirs, gguf.quants.quantize(array, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def denoise(look: Look, prompt: list[int], tokens: int, steps: int, mask: int) -> list[int]:
    """Answer as LLaDA's sampler does: each step accepts the surest of its masks' best tokens."""
    ids, first = [*prompt, *[mask] * tokens], len(prompt)
    masked_C = numpy.ones(tokens, dtype=bool)
    for left in range(steps, 0, -1):
        at_R = masked_C.nonzero()[0]
        logits_RV = look(ids, first)[at_R]
        logits_RV[:, mask] = -numpy.inf
        confidence_R = 1 / numpy.exp(logits_RV - logits_RV.max(1, keepdims=True)).sum(1)
        share = -(-len(at_R) // left)
        for row in numpy.argsort(-confidence_R, kind="stable")[:share]:
            ids[first + at_R[row]] = int(logits_RV[row].argmax())
            masked_C[at_R[row]] = False
    return ids[first:]


def prompts(length: int) -> tuple[list[int], list[int]]:
    """Return the prompt that warms up, and the one that counts."""
    return [*range(FIRST + length, FIRST + 2 * length)], [*range(FIRST, FIRST + length)]


def theirs(args: argparse.Namespace, file: Path) -> paired.Turn:
    """Return the turn of llama.cpp."""
    mask = json.loads((args.checkpoint / "config.json").read_text())["mask_token_id"]
    peer, before, ids = LlamaCpp(args.library.resolve(), str(file)), 0.0, list[int]()
    for prompt in prompts(args.prompt):
        before = peer.seconds
        ids = denoise(peer.look, prompt, args.tokens, args.steps, mask)
    return paired.Turn(peer.seconds - before, [ids], [args.steps])


def ours(args: argparse.Namespace, file: Path) -> paired.Turn:
    """Return the turn of an engine."""
    options = EngineOptions(dtype="float32", device="cpu", max_num_seqs=1)
    engine = build_rank(str(file), options, Mesh())
    asked = requests(args.tokens, args.steps)[args.side]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, **asked)
    begin, before, ids = 0.0, 0, list[int]()
    for number, prompt in enumerate(prompts(args.prompt)):
        engine.add(Request(number, tuple(prompt), params))
        begin, before, ids = time.process_time(), engine.forwards, []
        while not engine.idle:
            for update in engine.step(1):
                ids += update.ids
    return paired.Turn(time.process_time() - begin, [ids], [engine.forwards - before])


def turn(args: argparse.Namespace, kind: str, side: str, _: int) -> paired.Turn:
    """Run a side in a process of its own."""
    words: list[Any] = [args.checkpoint, "--library", args.library, "--types", kind]
    words += ["--prompt", args.prompt, "--tokens", args.tokens, "--steps", args.steps]
    return alone("benchmarks.peers.llama_cpp_llada", side, [*map(str, words)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="of benchmarks.random_checkpoint")
    parser.add_argument("--library", type=Path, required=True, help="the folder of libllama")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--types", nargs="+", default=["f32", "q8_0", "q4_0"])
    parser.add_argument("--repeats", type=int, default=3, help="turns, after one that warms up")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        answer = theirs if args.side == PEER else ours
        return print(json.dumps(answer(args, gguf_of(args.checkpoint, args.types[0]))))
    if find_spec("gguf") is None:
        parser.error("files are written by the package gguf; pip install gguf")
    work = f"{args.tokens} tokens in {args.steps} steps after {args.prompt}"
    for kind in args.types:
        gguf_of(args.checkpoint, kind)
        systems = [
            System(name, partial(turn, args, kind, name), name != CACHED)
            for name in (OURS, CACHED, PEER)
        ]
        compare(f"{kind}, {work}, one thread, processor seconds", systems, args.repeats)


if __name__ == "__main__":
    main()
