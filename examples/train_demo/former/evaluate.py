"""Measure a checkpoint of the former recipe on its own held-out questions.

`python -m examples.train_demo.former.evaluate FOLDER` writes metrics.json into the folder;
`--table` prints decoders by caches instead, and `--formats` and `--kv-formats` what weights
(`quantization`) and K/V (`kv_cache_dtype`) in few bits cost in answers.
"""

import argparse
import time
from pathlib import Path

from diffray import DiffusionLLM
from diffray.components.kv_pool import position_bytes
from examples.train_demo.evaluate import THRESHOLD, caches_of, print_table, run, write_metrics
from examples.train_demo.former.tasks import held_out_items
from examples.train_demo.words import Item


def print_formats(folder: Path, formats: list[str], items: list[Item], max_tokens: int) -> None:
    print("| weights | exact match | tokens per forward | seconds |")
    print("|---|---|---|---|")
    for name in formats:
        quantization = None if name == "none" else name
        with DiffusionLLM(str(folder), dtype="float32", quantization=quantization) as llm:
            m = run(llm, items, THRESHOLD, "none", max_tokens)
        print(
            f"| {name} | {m['exact_match']:.4f} | {m['tokens_per_forward']:.2f} "
            f"| {m['seconds']:.1f} |",
            flush=True,
        )


def print_kv_formats(folder: Path, formats: list[str], items: list[Item], max_tokens: int) -> None:
    """Under all caches by which steps read K/V that were stored before."""
    print("| cache | K/V | bytes a position | exact match | tokens per forward | processor s |")
    print("|---|---|---|---|---|---|")
    for cache in caches_of(folder)[1:]:
        for name in formats:
            with DiffusionLLM(str(folder), dtype="float32", kv_cache_dtype=name) as llm:
                shapes, kv = llm.limits.spec.kv_shapes, llm.engine.kv
                size, begin = position_bytes(shapes, kv.dtype, kv.form), time.process_time()
                m = run(llm, items, THRESHOLD, cache, max_tokens)
                seconds = time.process_time() - begin
            print(
                f"| `{cache}` | {name} | {size} | {m['exact_match']:.4f} "
                f"| {m['tokens_per_forward']:.2f} | {seconds:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--seed", type=int, default=4321, help="draws the held-out items")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--table", action="store_true", help="print decoders by caches instead")
    parser.add_argument("--formats", nargs="+", help="print formats of weights instead")
    parser.add_argument("--kv-formats", nargs="+", help="print formats of K/V instead")
    arguments = parser.parse_args()
    items = held_out_items(arguments.items, arguments.seed)
    if arguments.formats:
        print_formats(arguments.folder, arguments.formats, items, arguments.max_tokens)
        return
    if arguments.kv_formats:
        print_kv_formats(arguments.folder, arguments.kv_formats, items, arguments.max_tokens)
        return
    # float32, so that the numbers do not hang on what the processor is fast at.
    with DiffusionLLM(str(arguments.folder), dtype="float32") as llm:
        if arguments.table:
            print_table(llm, items, caches_of(arguments.folder), arguments.max_tokens)
            return
        measured = run(llm, items, THRESHOLD, "none", arguments.max_tokens)
    write_metrics("examples.train_demo.former.evaluate", arguments, measured)


if __name__ == "__main__":
    main()
