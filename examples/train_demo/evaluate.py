"""Measure a demo checkpoint: `python -m examples.train_demo.evaluate FOLDER`.

Writes metrics.json into the folder. `--table` prints decoders by caches instead, and `--formats`
what quantized weights (`quantization`) cost in answers.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diffray import DiffusionLLM, RequestOutput, SamplingParams
from examples.train_demo.tasks import held_out_items
from examples.train_demo.words import Item

DECODERS: dict[str, dict[str, Any]] = {
    "threshold 0.9": {"kind": "threshold", "threshold": 0.9},
    "threshold 0.7": {"kind": "threshold", "threshold": 0.7},
    "hierarchy 0.9": {"kind": "hierarchy", "threshold": 0.9},
    "credit 0.9": {"kind": "credit", "threshold": 0.9},
    "fixed, 32 steps": {"kind": "fixed", "steps": 32},
}
THRESHOLD = DECODERS["threshold 0.9"]


def run(
    llm: DiffusionLLM, items: list[Item], decoder: dict[str, Any], cache: str, max_tokens: int
) -> dict[str, Any]:
    """Exact match, tokens per forward and seconds over the items, greedy."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        diffusion={"block_length": 32, "decoder": decoder, "cache": {"kind": cache}},
    )
    begin = time.perf_counter()
    chats = [[{"role": "user", "content": item.question}] for item in items]
    outputs: list[RequestOutput] = llm.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    hits: dict[str, list[bool]] = {}
    for item, output in zip(items, outputs, strict=True):
        right = output.outputs[0].text.strip() == item.answer
        hits.setdefault(item.task, []).append(right)
    # An answer that stopped ends with the end token, which is not counted.
    choices = [output.outputs[0] for output in outputs]
    tokens = sum(len(c.token_ids) - (c.finish_reason == "stop") for c in choices)
    forwards = sum(output.forwards for output in outputs)
    return {
        "exact_match": round(sum(sum(h) for h in hits.values()) / len(items), 4),
        "exact_match_by_task": {task: round(sum(h) / len(h), 4) for task, h in hits.items()},
        "tokens_per_forward": round(tokens / forwards, 2),
        "tokens": tokens,
        "forwards": forwards,
        "seconds": round(seconds, 1),
    }


def print_table(llm: DiffusionLLM, items: list[Item], caches: list[str], max_tokens: int) -> None:
    print("| decoder | cache | exact match | tokens per forward | seconds |")
    print("|---|---|---|---|---|")
    for name, decoder in DECODERS.items():
        for cache in caches:
            m = run(llm, items, decoder, cache, max_tokens)
            print(
                f"| {name} | {cache} | {m['exact_match']:.3f} | {m['tokens_per_forward']:.2f} "
                f"| {m['seconds']:.1f} |",
                flush=True,
            )


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--seed", type=int, default=4321, help="draws the held-out items")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--table", action="store_true", help="print decoders by caches instead")
    parser.add_argument("--formats", nargs="+", help="print formats of weights instead")
    arguments = parser.parse_args()
    items = held_out_items(arguments.items, arguments.seed)
    config = json.loads((arguments.folder / "config.json").read_text())
    causal = config["model_type"] == "llada2_moe"
    if arguments.formats:
        print_formats(arguments.folder, arguments.formats, items, arguments.max_tokens)
        return
    # float32, so that the numbers do not hang on what the processor is fast at.
    with DiffusionLLM(str(arguments.folder), dtype="float32") as llm:
        if arguments.table:
            caches = ["none", "exact"] if causal else ["none", "prefix", "dual", "vicinity"]
            print_table(llm, items, caches, arguments.max_tokens)
            return
        measured = run(llm, items, THRESHOLD, "none", arguments.max_tokens)
    path = arguments.folder / "metrics.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    # An absolute path would tell a reader on another machine nothing.
    words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
    metrics = before | {
        "command": " ".join(["python -m examples.train_demo.evaluate", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "decoder": THRESHOLD | {"block_length": 32, "cache": "none", "temperature": 0},
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "items": arguments.items,
        **measured,
    }
    path.write_text(json.dumps(metrics, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
