"""Fields as JSON: free, guided by a schema, and filled into a pinned canvas in two forwards or one.

`python -m benchmarks.decisions` asks a demo model held-out questions of its JSON task and prints
how many fields are right, forwards per answer, and records per second. The ways take turns, so with
more schemas than the engine keeps compiled (256), the time includes compiling them again.
"""

import json
from collections.abc import Callable, Mapping
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks import paired
from diffray import DiffusionLLM, RequestOutput, SamplingParams
from examples.train_demo.json_extraction import ANIMALS, COLORS, EVENTS, WEEK
from examples.train_demo.tasks import draw
from examples.train_demo.words import CITIES, JOBS, THINGS, Item

Schema = Mapping[str, Any]

# What the task's generator draws from, besides words that it invents.
LOWER: Final = [day.lower() for day in WEEK]
CHOICES: Final = (WEEK, LOWER, EVENTS, COLORS, ANIMALS, JOBS, CITIES, THINGS)


class Found(NamedTuple):
    """The result of one way of asking."""

    right: float  # share of the fields
    valid: float  # share of the answers that are JSON with the fields asked for
    forwards: float  # per answer
    most_forwards: int


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
    """Return the schema of a value; a name or an invented word may be any string."""
    if isinstance(value, int):
        return {"type": "integer", "minimum": 1, "maximum": 999}
    for words in CHOICES:
        if value in words:
            return {"enum": list(words)}
    return {"type": "string", "maxLength": 32}


def ask(llm: DiffusionLLM, items: list[Item], params: list[SamplingParams]) -> Found:
    """Answer all questions as one batch."""
    chats = [[{"role": "user", "content": item.question}] for item in items]
    outputs: list[RequestOutput] = llm.chat(chats, params, use_tqdm=False)
    fields = right = valid = 0
    for item, output in zip(items, outputs, strict=True):
        wanted, made = json.loads(item.answer), _parsed(output.outputs[0].text)
        fields += len(wanted)
        right += sum(made.get(name) == value for name, value in wanted.items())
        valid += made.keys() == wanted.keys()
    forwards = [output.forwards for output in outputs]
    count = len(items)
    return Found(right / fields, valid / count, sum(forwards) / count, max(forwards))


def ways(
    items: list[Item], max_tokens: int, slot_length: int | None = None
) -> dict[str, list[SamplingParams]]:
    """Return the parameters of each question: free, guided, and pinned with two forwards or one."""
    schemas = [{"json": schema_of(item)} for item in items]
    pinned: dict[str, Any] = {"canvas": "pinned", "slot_length": slot_length}
    one = pinned | {"decoder": {"kind": "whole_slots", "threshold": 0}}

    def by_schema(**more: Any) -> list[SamplingParams]:
        more["max_tokens"] = max_tokens
        return [SamplingParams(structured_outputs=schema, **more) for schema in schemas]

    return {
        "free": [SamplingParams(max_tokens=max_tokens)] * len(items),
        "guided": by_schema(),
        "pinned": by_schema(diffusion=pinned),
        "pinned, one forward": by_schema(diffusion=one),
    }


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def main() -> None:
    parser = paired.parser(__doc__, turns=3, seed=4321)
    parser.add_argument("--model", default="demo", help="demo or demo-llada2")
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--slot-length", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    args = parser.parse_args()
    clock = paired.clock_of(args)
    items = questions(args.items, args.seed)
    print(clock.label)
    columns = "fields right", "valid", "forwards: mean", "most", "records/s", "to free"
    print(paired.head("answers", *columns), flush=True)
    with DiffusionLLM(args.model, max_num_seqs=args.max_num_seqs) as llm:

        def contender(params: list[SamplingParams]) -> Callable[[int], tuple[Found, float]]:
            def take(_: int) -> tuple[Found, float]:
                begin = clock.read()
                return ask(llm, items, params), len(items) / (clock.read() - begin)

            return take

        every = ways(items, args.max_tokens, args.slot_length)
        turns = paired.take_turns({n: contender(p) for n, p in every.items()}, args.repeats)
    rates = {name: [rate for _, rate in taken] for name, taken in turns.items()}
    for name, taken in turns.items():
        right, valid, forwards, most = taken[-1][0]
        cells = f"{right:.4f}", f"{valid:.4f}", f"{forwards:.2f}", most
        speed = f"{median(rates[name]):.1f}", paired.ratio(rates[name], rates["free"])
        print(paired.row(name, *cells, *speed))


if __name__ == "__main__":
    main()
