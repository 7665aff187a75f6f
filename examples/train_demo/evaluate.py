"""Measure a demo checkpoint: `python -m examples.train_demo.evaluate FOLDER`.

Writes metrics.json into the folder: held-out questions in trained and in new phrasings, questions
written by hand, copying, and prompts outside the tasks. `--wrong` prints wrong answers. `--table`
instead prints decoders by caches on the harder tasks; `--formats` and `--kv-formats` print how
weights (`quantization`) and K/V (`kv_cache_dtype`) in few bits change accuracy.
"""

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from diffray import DiffusionLLM, RequestOutput, SamplingParams
from diffray.components.grammar.tool_calls import OPEN
from diffray.components.kv_pool import position_bytes
from examples.train_demo.judge import bare, is_right, returns
from examples.train_demo.outside import ANSWER
from examples.train_demo.tasks import (
    FOLDER,
    GENERATORS,
    HARDER,
    chat,
    draw,
    is_near_written,
    rows_of,
)
from examples.train_demo.tool_questions import Tool, one_call, shown
from examples.train_demo.words import Item

Json = dict[str, Any]
POLICIES: dict[str, Json] = {
    "threshold 0.9": {"decoder": {"kind": "threshold", "threshold": 0.9}},
    "threshold 0.7": {"decoder": {"kind": "threshold", "threshold": 0.7}},
    "hierarchy 0.9": {"decoder": {"kind": "hierarchy", "threshold": 0.9}},
    "credit 0.9": {"decoder": {"kind": "credit", "threshold": 0.9}},
    "lopa 0.9": {"decoder": {"kind": "lopa", "threshold": 0.9}},
    "fixed, 32 steps": {"decoder": {"kind": "fixed", "steps": 32}},
    "soft, threshold 0.9": {
        "decoder": {"kind": "threshold", "threshold": 0.9}, "iteration": {"kind": "soft"},
    },
}  # fmt: skip
THRESHOLD = POLICIES["threshold 0.9"]
LONG = 128  # tokens that a call may take
TABLE_BATCH = 4  # `lopa` shares 16 copies among the running: 4 branches each


class Answers(NamedTuple):
    """A model's answers to some items, in their order, and their cost."""

    texts: list[str]
    tokens: int
    forwards: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        return round(self.tokens / max(self.forwards, 1), 2)


def ask(
    llm: DiffusionLLM,
    items: list[Item],
    policy: Json,
    cache: str,
    max_tokens: int,
    at_once: int | None = None,
    required: bool = False,
) -> Answers:
    """Answer the items greedily, in one batch or in batches of `at_once`.

    With `required`, an answer is one call of the functions beside its question.
    """
    diffusion = {"block_length": 32, "cache": {"kind": cache}, "canvas": "fixed"} | policy
    params = [
        SamplingParams(
            max_tokens=max_tokens, temperature=0, diffusion=diffusion,
            structured_outputs=one_call(item.system) if required else None,
        )
        for item in items
    ]  # fmt: skip
    size = at_once or len(items)
    begin = time.perf_counter()
    outputs: list[RequestOutput] = []
    for at in range(0, len(items), size):
        chats = [chat(i) for i in items[at : at + size]]
        outputs += llm.chat(chats, params[at : at + size], use_tqdm=False)
    seconds = time.perf_counter() - begin
    choices = [output.outputs[0] for output in outputs]
    # An answer that stopped ends with an end token, which does not count.
    tokens = sum(len(c.token_ids) - (c.finish_reason == "stop") for c in choices)
    forwards = sum(output.forwards for output in outputs)
    return Answers([c.text.strip() for c in choices], tokens, forwards, round(seconds, 1))


def run(
    llm: DiffusionLLM,
    items: list[Item],
    policy: Json,
    cache: str,
    max_tokens: int,
    at_once: int | None = None,
) -> dict[str, Any]:
    """Return exact match, tokens per forward and seconds over the items, greedy."""
    answers = ask(llm, items, policy, cache, max_tokens, at_once)
    hits: dict[str, list[bool]] = defaultdict(list)
    for item, text in zip(items, answers.texts, strict=True):
        hits[item.task].append(text == item.answer)
    return {
        "exact_match": share([h for task in hits.values() for h in task]),
        "exact_match_by_task": {task: share(h) for task, h in hits.items()},
        "tokens_per_forward": answers.tokens_per_forward,
        "tokens": answers.tokens,
        "forwards": answers.forwards,
        "seconds": answers.seconds,
    }


def share(hits: list[bool]) -> float:
    return round(sum(hits) / max(len(hits), 1), 4)


def drawn(
    split: str, count: int, seed: int, tasks: tuple[str, ...] = tuple(GENERATORS)
) -> list[Item]:
    """Return distinct items of one split, from each task in turn."""
    rng, items = random.Random(seed), dict[str, Item]()
    while len(items) < count:
        item = draw(rng, tasks[len(items) % len(tasks)], split)
        items.setdefault("\n".join(m["content"] for m in chat(item)), item)
    return list(items.values())


def harder_half(count: int, seed: int) -> list[Item]:
    """Return held-out items of the harder tasks whose answers are not short."""
    items = drawn("entities", 4 * count, seed, HARDER)
    return [i for i in items if len(i.answer.split()) + i.answer.count(",") >= 6][:count]


def written_items(name: str) -> list[tuple[Item, Any]]:
    """Return a file's questions written by hand, with the expected answers."""
    items = []
    for row in rows_of(name):
        before = tuple((question, answer) for question, answer in row.get("before", []))
        system = shown([Tool(*tool) for tool in row.get("tools", [])])
        item = Item(row["kind"], row["question"], "", "", before, system, row.get("role", "user"))
        items.append((item, row["answer"]))
    return items


def judged(
    llm: DiffusionLLM,
    written: list[tuple[Item, Any]],
    most: int,
    wrong: bool,
    required: bool = False,
) -> dict[str, list[bool]]:
    """Return whether each answer is the expected one, by kind of question; print wrong ones."""
    hits = defaultdict[str, list[bool]](list)
    said = ask(llm, [item for item, _ in written], THRESHOLD, "none", most, required=required)
    for (item, expected), text in zip(written, said.texts, strict=True):
        hits[item.task].append(is_right(item.task, text, expected))
        if wrong and not hits[item.task][-1]:
            print(f"{item.system} {item.before} {item.question}\n    {text!r}, not {expected!r}")
    return hits


def calls_when_required(llm: DiffusionLLM, drawn: list[Item], wrong: bool) -> Json:
    """Return the shares of right calls where one is required, for functions that fit."""
    held_out = [(i, json.loads(bare(i.answer))) for i in drawn if i.answer.startswith(OPEN)]
    written = [(i, e) for i, e in written_items("tools") if isinstance(e, dict)]
    return {
        name: share([*chain(*judged(llm, items, LONG, wrong, required=True).values())])
        for name, items in (("held_out", held_out), ("written_by_hand", written))
    }


def copied(items: list[Item], texts: list[str]) -> Json:
    """Return the shares of JSON answers' words and numbers that were copied right."""
    hits: dict[str, list[bool]] = {"words": [], "numbers": []}
    for item, text in zip(items, texts, strict=True):
        try:
            found = json.loads(text)
        except ValueError:
            found = {}
        for key, value in json.loads(item.answer).items():
            right = isinstance(found, dict) and found.get(key) == value
            hits["numbers" if isinstance(value, int) else "words"].append(right)
    return {kind: share(h) for kind, h in hits.items()} | {"values": sum(map(len, hits.values()))}


def near_duplicates(draws: int, tests: list[Item]) -> Json:
    """Count near-duplicates, which differ only in names and things, among training items."""
    rng = random.Random(0)
    kept = {draw(rng, task).key for task in GENERATORS for _ in range(draws // len(GENERATORS))}
    seen = sum(item.key in kept for item in tests)
    near = sum(is_near_written(Item("", "", "", key)) for key in kept)
    return {"training_items_looked_at": draws, "equal_to_held_out": seen, "equal_to_written": near}


def measure(llm: DiffusionLLM, arguments: argparse.Namespace) -> Json:
    """Return all measurements of metrics.json."""
    most = arguments.max_tokens

    def of(items: list[Item]) -> Json:
        return run(llm, items, THRESHOLD, "none", most)

    trained = drawn("entities", arguments.items, arguments.seed)
    new = drawn("phrasings", arguments.items, arguments.seed)
    by_kind = judged(llm, written_items("questions"), most, arguments.wrong)
    code = [item for item in trained + new if item.task == "code"]
    bodies = ask(llm, code, THRESHOLD, "none", most).texts
    unrelated = [Item("", u, ANSWER) for u in json.loads((FOLDER / "unrelated.json").read_text())]
    refused = ask(llm, unrelated, THRESHOLD, "none", most)
    if arguments.wrong:
        for item, text in zip(unrelated, refused.texts, strict=True):
            if text != ANSWER:
                print(f"{item.question}\n    {text!r}")
    facts = drawn("entities", arguments.items, arguments.seed, ("json",))
    few, seed = arguments.items // len(GENERATORS), arguments.seed
    new_tasks = {task: drawn("entities", few, seed, (task,)) for task in ("later", "tool")}
    return of(trained) | {
        "new_phrasings": of(new),
        **{task: run(llm, items, THRESHOLD, "none", LONG) for task, items in new_tasks.items()},
        "code_that_does_not_compile": sum(not returns(text, []) for text in bodies),
        "code_looked_at": len(bodies),
        "written_by_hand_later": {
            name: share([*chain(*judged(llm, items, LONG, arguments.wrong).values())])
            for name in ("asked", "later", "tools")
            for items in [written_items(name)]
        },
        "calls_when_required": calls_when_required(llm, new_tasks["tool"], arguments.wrong),
        "written_by_hand": share([*chain(*by_kind.values())]),
        "written_by_hand_by_kind": {kind: share(hits) for kind, hits in by_kind.items()},
        "unrelated_recognised": share([text == ANSWER for text in refused.texts]),
        "copied": copied(facts, ask(llm, facts, THRESHOLD, "none", most).texts),
        "harder_half": of(harder_half(arguments.items // 2, arguments.seed)),
        "near_duplicates": near_duplicates(arguments.draws, trained + new),
    }


def print_table(llm: DiffusionLLM, items: list[Item], caches: list[str], max_tokens: int) -> None:
    """Print policies by caches, with few items at once: larger batches leave `lopa` no branches."""
    print("| policy | cache | exact match | tokens per forward | seconds |")
    print("|---|---|---|---|---|")
    for name, policy in POLICIES.items():
        for cache in caches:
            m = run(llm, items, policy, cache, max_tokens, TABLE_BATCH)
            print(
                f"| {name} | {cache} | {m['exact_match']:.3f} | {m['tokens_per_forward']:.2f} "
                f"| {m['seconds']:.1f} |",
                flush=True,
            )


def print_formats(arguments: argparse.Namespace, items: list[Item]) -> None:
    print("| weights | exact match | tokens per forward | seconds |")
    print("|---|---|---|---|")
    for name in arguments.formats:
        quantization = None if name == "none" else name
        with DiffusionLLM(str(arguments.folder), dtype="float32", quantization=quantization) as llm:
            m = run(llm, items, THRESHOLD, "none", arguments.max_tokens)
        print(
            f"| {name} | {m['exact_match']:.4f} | {m['tokens_per_forward']:.2f} "
            f"| {m['seconds']:.1f} |",
            flush=True,
        )


def print_kv_formats(arguments: argparse.Namespace, items: list[Item]) -> None:
    """Print K/V formats, with all caches that read K/V of earlier steps."""
    print("| cache | K/V | bytes a position | exact match | tokens per forward | processor s |")
    print("|---|---|---|---|---|---|")
    for cache in caches_of(arguments.folder)[1:]:
        for name in arguments.kv_formats:
            with DiffusionLLM(str(arguments.folder), dtype="float32", kv_cache_dtype=name) as llm:
                shapes, kv = llm.limits.spec.kv_shapes, llm.engine.kv
                size, begin = position_bytes(shapes, kv.dtype, kv.form), time.process_time()
                m = run(llm, items, THRESHOLD, cache, arguments.max_tokens)
                seconds = time.process_time() - begin
            print(
                f"| `{cache}` | {name} | {size} | {m['exact_match']:.4f} "
                f"| {m['tokens_per_forward']:.2f} | {seconds:.1f} |",
                flush=True,
            )


def caches_of(folder: Path) -> list[str]:
    """Return the kinds of cache that the checkpoint's family supports."""
    config = json.loads((folder / "config.json").read_text())
    causal = config["model_type"] == "llada2_moe"
    return ["none", "exact"] if causal else ["none", "prefix", "dual", "vicinity"]


def write_metrics(arguments: argparse.Namespace, measured: Json) -> None:
    """Write what was measured, and how, to the folder's metrics.json, and print it."""
    path = arguments.folder / "metrics.json"
    # An absolute path means nothing on another machine.
    words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
    metrics = {
        "command": " ".join(["python -m examples.train_demo.evaluate", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "decoder": THRESHOLD["decoder"] | {"block_length": 32, "cache": "none", "temperature": 0},
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "items": arguments.items,
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
    parser.add_argument(
        "--draws", type=int, default=70000, help="training items for near-duplicates"
    )
    parser.add_argument("--table", action="store_true", help="print decoders by caches instead")
    parser.add_argument("--formats", nargs="+", help="print formats of weights instead")
    parser.add_argument("--kv-formats", nargs="+", help="print formats of K/V instead")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    arguments = parser.parse_args()
    if arguments.formats or arguments.kv_formats:
        show = print_formats if arguments.formats else print_kv_formats
        show(arguments, drawn("entities", arguments.items, arguments.seed))
        return
    # float32, so that the numbers do not depend on the processor's fast dtype.
    with DiffusionLLM(str(arguments.folder), dtype="float32") as llm:
        if arguments.table:
            harder = harder_half(arguments.items, arguments.seed)
            print_table(llm, harder, caches_of(arguments.folder), arguments.max_tokens)
            return
        measured = measure(llm, arguments)
    write_metrics(arguments, measured)


if __name__ == "__main__":
    main()
