"""Fields as JSON: free, guided by a schema, and filled into a pinned canvas.

`python -m benchmarks.decisions` asks a demo model held-out questions of its JSON task and prints
how many fields are right, forwards per answer, and records per second, the best of some runs.
"""

import argparse
import json
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Final, NamedTuple

from diffray import DiffusionLLM, RequestOutput, SamplingParams
from examples.train_demo.json_extraction import ANIMALS, COLORS, EVENTS, WEEK
from examples.train_demo.tasks import draw
from examples.train_demo.words import CITIES, JOBS, THINGS, Item

Schema = Mapping[str, Any]

# What the task's generator draws from, besides words that it invents.
CHOICES: Final = (
    WEEK,
    [day.lower() for day in WEEK],
    EVENTS,
    COLORS,
    ANIMALS,
    JOBS,
    CITIES,
    THINGS,
)


class Found(NamedTuple):
    """What one way of asking gave."""

    right: float  # share of the fields
    valid: float  # share of the answers that are JSON with the fields asked for
    forwards: float  # per answer
    most_forwards: int
    records_per_s: float


def questions(count: int, seed: int = 4321) -> list[Item]:
    """Return distinct held-out questions of the JSON task."""
    rng, found = Random(seed), dict[str, Item]()
    while len(found) < count:
        item = draw(rng, "json", "entities")
        found[item.question] = item
    return list(found.values())


def schema_of(item: Item) -> dict[str, Any]:
    """Return the schema of a question's answer, whose keys may have any names."""
    properties = {name: field_of(value) for name, value in json.loads(item.answer).items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def field_of(value: str | int) -> Schema:
    """Return what is allowed in the place of a value: names and invented words are open."""
    if isinstance(value, int):
        return {"type": "integer", "minimum": 1, "maximum": 999}
    for words in CHOICES:
        if value in words:
            return {"enum": list(words)}
    return {"type": "string", "maxLength": 32}


def ask(llm: DiffusionLLM, items: list[Item], params: list[SamplingParams], runs: int = 1) -> Found:
    """Answer all questions as one batch, several times."""
    chats = [[{"role": "user", "content": item.question}] for item in items]
    seconds: list[float] = []
    outputs: list[RequestOutput] = []
    for _ in range(runs):
        begin = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    fields = right = valid = 0
    for item, output in zip(items, outputs, strict=True):
        wanted, made = json.loads(item.answer), _parsed(output.outputs[0].text)
        fields += len(wanted)
        right += sum(made.get(name) == value for name, value in wanted.items())
        valid += made.keys() == wanted.keys()
    forwards = [output.forwards for output in outputs]
    count = len(items)
    return Found(
        right / fields, valid / count, sum(forwards) / count, max(forwards), count / min(seconds)
    )


def ways(
    items: list[Item], max_tokens: int, slot_length: int | None = None
) -> dict[str, list[SamplingParams]]:
    """Return the parameters of each question: free, guided, and pinned."""
    schemas = [{"json": schema_of(item)} for item in items]
    pinned = {"canvas": "pinned", "slot_length": slot_length}
    return {
        "free": [SamplingParams(max_tokens=max_tokens)] * len(items),
        "guided": [SamplingParams(max_tokens=max_tokens, structured_outputs=s) for s in schemas],
        "pinned": [
            SamplingParams(max_tokens=max_tokens, structured_outputs=s, diffusion=pinned)
            for s in schemas
        ],
    }


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo or demo-llada2")
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--slot-length", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    items = questions(args.items)
    print("| answers | fields right | valid | forwards: mean | most | records/s | to free |")
    print("|---|---|---|---|---|---|---|")
    with DiffusionLLM(args.model, max_num_seqs=args.max_num_seqs) as llm:
        free = 0.0
        for name, params in ways(items, args.max_tokens, args.slot_length).items():
            ask(llm, items, params)  # grammars are compiled, kernels warm
            found = ask(llm, items, params, args.runs)
            free = free or found.records_per_s
            print(
                f"| {name} | {found.right:.4f} | {found.valid:.4f} | {found.forwards:.2f} | "
                f"{found.most_forwards} | {found.records_per_s:.1f} | "
                f"{found.records_per_s / free:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
