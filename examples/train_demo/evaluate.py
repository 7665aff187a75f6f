"""Measure a demo checkpoint: `python -m examples.train_demo.evaluate FOLDER`.

Writes metrics.json into the folder: held-out questions in trained and in new phrasings, questions
written by hand, copying, and prompts outside the tasks. `--wrong` prints wrong answers. `--formats`
and `--kv-formats` instead print how weights (`quantization`) and K/V (`kv_cache_dtype`) in few bits
change accuracy.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from diffray import DiffusionLLM, SamplingParams
from diffray.components.checkpoints.info import describe
from diffray.components.grammar.tool_calls import OPEN
from diffray.components.kv_pool import position_bytes
from examples.train_demo.judge import bare, is_right, returns
from examples.train_demo.outside import ANSWER
from examples.train_demo.tasks import (
    GENERATORS,
    WRITTEN,
    chat,
    drawn,
    harder_half,
    rows_of,
)
from examples.train_demo.tool_questions import Tool, one_call, shown
from examples.train_demo.words import Item

Json = dict[str, Any]
Hits = dict[str, list[bool]]  # by kind of question
DECODER = {"kind": "threshold", "threshold": 0.9}
LONG = 128  # tokens that a call may take


class Answers(NamedTuple):
    """A model's answers to some items, in their order, and their cost."""

    texts: list[str]
    tokens: int
    forwards: int
    seconds: float


def ask(
    llm: DiffusionLLM,
    items: list[Item],
    max_tokens: int,
    cache: str = "none",
    required: bool = False,
) -> Answers:
    """Answer the items greedily, with one call of the functions beside each if `required`."""
    diffusion = {
        "block_length": 32, "canvas": "fixed", "decoder": DECODER, "cache": {"kind": cache},
    }  # fmt: skip
    params = [
        SamplingParams(
            max_tokens=max_tokens, temperature=0, diffusion=diffusion,
            structured_outputs=one_call(item.system) if required else None,
        )
        for item in items
    ]  # fmt: skip
    begin = time.perf_counter()
    outputs = llm.chat([chat(item) for item in items], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    choices = [output.outputs[0] for output in outputs]
    # An answer that stopped ends with an end token, which does not count.
    tokens = sum(len(c.token_ids) - (c.finish_reason == "stop") for c in choices)
    forwards = sum(output.forwards for output in outputs)
    return Answers([c.text.strip() for c in choices], tokens, forwards, round(seconds, 1))


def run(llm: DiffusionLLM, items: list[Item], max_tokens: int, cache: str = "none") -> Json:
    """Return exact match, tokens per forward and seconds over the items, greedy."""
    answers = ask(llm, items, max_tokens, cache)
    hits: Hits = defaultdict(list)
    for item, text in zip(items, answers.texts, strict=True):
        hits[item.task].append(text == item.answer)
    return {
        "exact_match": share(hits),
        "exact_match_by_task": shares(hits),
        "tokens_per_forward": round(answers.tokens / max(answers.forwards, 1), 2),
        "tokens": answers.tokens,
        "forwards": answers.forwards,
        "seconds": answers.seconds,
    }


def share(hits: Hits) -> float:
    """Return the share of right answers of all kinds."""
    found = [hit for kind in hits.values() for hit in kind]
    return round(sum(found) / max(len(found), 1), 4)


def shares(hits: Hits) -> dict[str, float]:
    return {kind: share({kind: found}) for kind, found in hits.items()}


def written_items(name: str) -> list[tuple[Item, Any]]:
    """Return a file's questions written by hand, with the expected answers."""
    items = []
    for row in rows_of(name):
        before = tuple((question, answer) for question, answer in row.get("before", []))
        system = shown([Tool(*tool) for tool in row.get("tools", [])])
        item = Item(row["kind"], row["question"], "", "", before, system, row.get("role", "user"))
        items.append((item, row["answer"]))
    return items


def copied(items: list[Item], texts: list[str]) -> Json:
    """Return the shares of JSON answers' words and numbers that were copied right."""
    hits: Hits = {"words": [], "numbers": []}
    for item, text in zip(items, texts, strict=True):
        try:
            found = json.loads(text)
        except ValueError:
            found = {}
        for key, value in json.loads(item.answer).items():
            right = isinstance(found, dict) and found.get(key) == value
            hits["numbers" if isinstance(value, int) else "words"].append(right)
    return shares(hits) | {"values": sum(map(len, hits.values()))}


def measure(llm: DiffusionLLM, given: argparse.Namespace) -> Json:
    """Return all measurements of metrics.json."""
    most, count, seed = given.max_tokens, given.items, given.seed

    def judged(asked: list[tuple[Item, Any]], most: int, required: bool = False) -> Hits:
        """Compare answers with the expected ones; print wrong ones if that is wanted."""
        hits: Hits = defaultdict(list)
        texts = ask(llm, [item for item, _ in asked], most, required=required).texts
        for (item, expected), text in zip(asked, texts, strict=True):
            hits[item.task].append(is_right(item.task, text, expected))
            if given.wrong and not hits[item.task][-1]:
                print(f"{item.system} {item.before} {item.question}\n  {text!r}, not {expected!r}")
        return hits

    trained, new = (drawn(split, count, seed) for split in ("entities", "phrasings"))
    beside = {
        task: drawn("entities", count // len(GENERATORS), seed, [task])
        for task in ("later", "tool")
    }
    code = [item for item in trained + new if item.task == "code"]
    bodies = ask(llm, code, most).texts
    facts = drawn("entities", count, seed, ["json"])
    questions, *later = WRITTEN
    by_kind = judged(written_items(questions), most)
    calls = {
        "held_out": [
            (i, json.loads(bare(i.answer))) for i in beside["tool"] if i.answer.startswith(OPEN)
        ],
        "written_by_hand": [(i, e) for i, e in written_items("tools") if isinstance(e, dict)],
    }
    unrelated = [(Item("outside", text, ANSWER), ANSWER) for text in rows_of("unrelated")]
    return run(llm, trained, most) | {
        "new_phrasings": run(llm, new, most),
        **{task: run(llm, items, LONG) for task, items in beside.items()},
        "code_that_does_not_compile": sum(not returns(text, []) for text in bodies),
        "code_looked_at": len(bodies),
        "written_by_hand_later": {n: share(judged(written_items(n), LONG)) for n in later},
        "calls_when_required": {n: share(judged(i, LONG, True)) for n, i in calls.items()},
        "written_by_hand": share(by_kind),
        "written_by_hand_by_kind": shares(by_kind),
        "unrelated_recognised": share(judged(unrelated, most)),
        "copied": copied(facts, ask(llm, facts, most).texts),
        "harder_half": run(llm, harder_half(count // 2, seed), most),
    }


def print_formats(given: argparse.Namespace) -> None:
    """Print formats of weights, or of K/V with all caches that read K/V of earlier steps."""
    items = drawn("entities", given.items, given.seed)
    rows: list[tuple[str, str, Json]] = [
        (name, "none", {"quantization": None if name == "none" else name}) for name in given.formats
    ] + [
        (name, cache, {"kv_cache_dtype": name})
        for cache in caches_of(given.folder)[1:]
        for name in given.kv_formats
    ]
    print("| format | cache | bytes a position | exact match | tokens per forward | processor s |")
    print("|---|---|---|---|---|---|")
    for name, cache, options in rows:
        with DiffusionLLM(str(given.folder), dtype="float32", **options) as llm:
            kv = llm.engine.kv
            size = position_bytes(llm.limits.spec.kv_shapes, kv.dtype, kv.form)
            begin = time.process_time()
            found = run(llm, items, given.max_tokens, cache)
            seconds = time.process_time() - begin
        print(
            f"| {name} | `{cache}` | {size} | {found['exact_match']:.4f} "
            f"| {found['tokens_per_forward']:.2f} | {seconds:.1f} |",
            flush=True,
        )


def caches_of(folder: Path) -> list[str]:
    """Return the kinds of cache that the checkpoint's family supports."""
    approximate = ["none", "prefix", "dual", "vicinity"]
    return ["none", "exact"] if describe(folder).block_causal else approximate


def write_metrics(given: argparse.Namespace, measured: Json) -> None:
    """Write what was measured, and how, to the folder's metrics.json, and print it."""
    path = given.folder / "metrics.json"
    # An absolute path means nothing on another machine.
    words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
    metrics = {
        "command": " ".join(["python -m examples.train_demo.evaluate", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "decoder": DECODER | {"block_length": 32, "cache": "none", "temperature": 0},
        "max_tokens": given.max_tokens,
        "seed": given.seed,
        "items": given.items,
        **measured,
    }
    path.write_text(json.dumps(metrics, indent=1) + "\n")
    print(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=1400, help="of each split")
    parser.add_argument("--seed", type=int, default=4321, help="draws the held-out items")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--formats", nargs="+", default=[], help="print formats of weights instead")
    parser.add_argument("--kv-formats", nargs="+", default=[], help="print formats of K/V instead")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    given = parser.parse_args()
    if given.formats or given.kv_formats:
        print_formats(given)
        return
    # float32, so that the numbers do not depend on the processor's fast dtype.
    with DiffusionLLM(str(given.folder), dtype="float32") as llm:
        measured = measure(llm, given)
    write_metrics(given, measured)


if __name__ == "__main__":
    main()
