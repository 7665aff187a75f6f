"""Compares settings of one engine: they take turns at the same work, and ratios are to the first.

    python -m benchmarks.ablate demo "" decoder=credit "decoder=threshold decoder.threshold=0.7"
    python -m benchmarks.ablate demo at_once=1 at_once=8
    python -m benchmarks.ablate /tmp/llada-100m "" quantization=int8 quantization=w8a8
    python -m benchmarks.ablate demo-llada2 --input-len 32 --common 512 \
        enable_prefix_caching=false enable_prefix_caching=true
    python -m benchmarks.ablate --records demo "" structured_outputs.json=@schema
    python -m benchmarks.ablate demo-chat --data chat --at-once 1 iteration=autoregressive ""

A setting is a quoted list of NAME=VALUE. Names are options of a request, as with `--set` of
`diffray generate`, `at_once` (how many requests run together), or options of `DiffusionLLM`;
`--all` holds what is the same for all settings. A value may be JSON without spaces, or @FILE. A
list of adapters (`lora=["a","b"]`) goes round the requests.

A demo model answers held-out questions to their end, with `--records` those of its JSON task; there
`structured_outputs.json=@schema` stands for each question's own schema. Other models, and demo
models with `--input-len`, continue random ids, and end tokens are ignored. With `--data` a model
answers the prompts of bundled data sets to their end. Every turn has its own prompts, as far as
there are enough.
"""

import argparse
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks import paired
from benchmarks.records import Marks, marks, questions, schema_of
from diffray import DiffusionLLM, RequestOutput, SamplingParams
from diffray.cluster.cli.datasets import as_ids, random_ids, read_rows
from diffray.cluster.cli.flags import DIFFUSION, put_setting
from diffray.components.checkpoints.demos import DEMOS
from diffray.components.checkpoints.info import describe
from examples.train_demo.tasks import chat, held_out_items
from examples.train_demo.words import Item

OF_REQUESTS = {*DIFFUSION, *SamplingParams.model_fields}
SCHEMA = "@schema"  # of each question


class Setting(NamedTuple):
    """The options of one contender."""

    at_once: int
    engine: dict[str, Any]
    request: dict[str, Any]
    megabytes: float  # of weights

    @property
    def key(self) -> str:
        """Settings with the same key share an engine."""
        return json.dumps(self.engine, sort_keys=True)


class Work(NamedTuple):
    """What all contenders do in one turn."""

    prompts: list[list[int]]
    lengths: list[int]  # the limits of the answers
    ignore_eos: bool
    items: list[Item]  # the questions, if they are those of a demo model


class Turn(NamedTuple):
    """The answers of one turn, and what they took."""

    seconds: float
    rows: list[list[int]]
    forwards: list[int]
    parts: list[float]  # the seconds of the requests that ran together
    cached: float  # the share of the prompts' tokens that was read from shared pages
    marks: Marks  # of records
    megabytes: float  # of weights

    @property
    def rate(self) -> float:
        """Return tokens per second, or records."""
        return (self.marks.records or sum(map(len, self.rows))) / self.seconds


def span(text: str) -> tuple[int, int]:
    """Read a number, or the least and the most: 16-96."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def parse(model: str, text: str, at_once: int) -> Setting:
    """Read a setting such as `dtype=float64 decoder.threshold=0.8`."""
    found: dict[str, Any] = {"at_once": at_once}
    engine: dict[str, Any] = {"dtype": "float32"}
    request: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if value.startswith("@") and value != SCHEMA:
            part = f"{name}={Path(value[1:]).read_text()}"
        if name in found:
            found[name] = int(value)
        elif (first := name.partition(".")[0]) in OF_REQUESTS:
            put_setting(request, part)
        else:
            engine.pop(first, None)
            put_setting(engine, part)
    size = describe(model, engine.get("quantization")).bytes_in_memory[engine["dtype"]]
    engine = {"max_num_seqs": found["at_once"]} | engine
    return Setting(found["at_once"], engine, request, size / 1e6)


def draw(llm: DiffusionLLM, args: argparse.Namespace, number: int) -> Work:
    """Return a turn's work, the same for the same seed and number."""
    seed = 1000 * args.seed + number
    draws = random.Random(seed)
    lengths = [draws.randint(*args.output_len) for _ in range(args.requests)]
    if args.data:
        sets = [read_rows(name, None, None) for name in args.data.split(",")]
        turned = deque(chain(*sets))
        turned.rotate(-number * args.requests)
        rows = [*islice(turned, args.requests)]
        return Work(as_ids(llm, rows, raw=False), lengths[: len(rows)], False, [])
    if args.input_len is None:
        assert llm.tokenizer is not None
        items = (questions if args.records else held_out_items)(args.requests, seed)
        prompts = [llm.tokenizer.encode_chat(chat(item)) for item in items]
        return Work(prompts, lengths, False, items)
    longest = random_ids(llm, args.requests, args.input_len[1], seed, args.common)
    cuts = [draws.randint(*args.input_len) for _ in longest]
    prompts = [ids[: args.common + cut] for ids, cut in zip(longest, cuts, strict=True)]
    return Work(prompts, lengths, True, [])


def params_of(setting: Setting, work: Work, row: int) -> SamplingParams:
    """Return the parameters of a request, with its own adapter and schema."""
    given: dict[str, Any] = {
        "max_tokens": work.lengths[row],
        "ignore_eos": work.ignore_eos,
        "seed": row,
    }
    given |= setting.request
    if isinstance(adapters := given.get("lora"), list):
        given["lora"] = adapters[row % len(adapters)]
    if given.get("structured_outputs") == {"json": SCHEMA}:
        given["structured_outputs"] = {"json": schema_of(work.items[row])}
    return SamplingParams(**given)


def carry_out(
    llm: DiffusionLLM, setting: Setting, work: Work, records: bool, clock: paired.Clock
) -> Turn:
    """Answer all prompts, `at_once` together."""
    params = [params_of(setting, work, row) for row in range(len(work.lengths))]
    llm.engine.kv.forget_prefixes()  # those of a setting that shares the engine
    parts, outputs = list[float](), list[RequestOutput]()
    for start in range(0, len(params), setting.at_once):
        part, begin = slice(start, start + setting.at_once), clock.read()
        outputs += llm.generate(work.prompts[part], params[part], use_tqdm=False)
        parts.append(clock.read() - begin)
    choices = [choice for output in outputs for choice in output.outputs]
    texts = [choice.text for choice in choices]
    return Turn(
        seconds=sum(parts),
        rows=[choice.token_ids for choice in choices],
        forwards=[output.forwards for output in outputs],
        parts=parts,
        cached=sum(o.cached_tokens for o in outputs) / sum(o.prompt_tokens for o in outputs),
        marks=marks(work.items, texts) if records else Marks(),
        megabytes=setting.megabytes,
    )


def table(args: argparse.Namespace) -> str:
    """Run all settings; return their table."""
    clock = paired.clock_of(args)
    settings = {
        text: parse(args.model, f"{args.all} {text}", args.at_once) for text in args.settings
    }
    engines: dict[str, DiffusionLLM] = {}
    with ExitStack() as stack:
        for each in settings.values():
            if each.key not in engines:
                engines[each.key] = stack.enter_context(DiffusionLLM(args.model, **each.engine))

        def contender(setting: Setting) -> Any:
            llm = engines[setting.key]
            return lambda turn: carry_out(llm, setting, draw(llm, args, turn), args.records, clock)

        contenders = {text: contender(setting) for text, setting in settings.items()}
        found = paired.take_turns(contenders, args.repeats)
    named = {f"`{text}`" if text else "defaults": turns for text, turns in found.items()}
    return paired.table("setting", named, [*columns(args.records)])


def slowest(own: Sequence[Turn], base: Sequence[Turn]) -> float:
    """Return the largest ratio of the seconds of the same requests, of those that ran together.

    Where turns have the same prompts, a request's seconds are the least of them.
    """
    same: dict[str, list[tuple[Turn, Turn]]] = {}
    for pair in zip(own, base, strict=True):
        same.setdefault(str(pair[1].rows), []).append(pair)
    return max(
        mine / first
        for turns in same.values()
        for mine, first in zip(
            least(turn for turn, _ in turns), least(turn for _, turn in turns), strict=False
        )
    )


def least(turns: Iterable[Turn]) -> list[float]:
    """Return the least seconds of what ran together."""
    return [min(parts) for parts in zip(*(turn.parts for turn in turns), strict=True)]


def columns(records: bool) -> Iterator[paired.Column[Turn]]:
    yield "weights, MB", lambda own, _: f"{own[-1].megabytes:.0f}"
    yield "s", lambda own, _: f"{median(turn.seconds for turn in own):.2f}"
    unit = "records/s" if records else "tokens/s"
    yield unit, lambda own, _: f"{median(turn.rate for turn in own):.1f}"
    yield (
        "to the first",
        lambda own, base: paired.ratio(*([t.rate for t in x] for x in (own, base))),
    )
    yield "slowest to the first", lambda own, base: f"{slowest(own, base):.2f}"
    yield "forwards", lambda own, _: sum(own[-1].forwards)
    yield "cached", lambda own, _: f"{own[-1].cached:.0%}"
    yield "equal", lambda own, base: paired.equal_answers(own[-1].rows, base[-1].rows)
    if records:
        yield "a record", lambda own, _: f"{fmean(own[-1].forwards):.2f}"
        yield "most", lambda own, _: max(own[-1].forwards)
        yield "fields right", lambda own, _: f"{fmean(turn.marks.right for turn in own):.4f}"
        yield "valid", lambda own, _: f"{fmean(turn.marks.valid for turn in own):.4f}"


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("model", help="a demo model or a folder")
    parser.add_argument("settings", nargs="+", metavar="SETTING")
    parser.add_argument("--all", default="", metavar="SETTING", help="what all settings share")
    parser.add_argument("--requests", type=int, default=8, help="of a turn")
    parser.add_argument("--at-once", type=int, default=8, help="requests that run together")
    parser.add_argument("--records", action="store_true", help="questions of the JSON task")
    parser.add_argument("--data", help="bundled data sets, such as chat,gsm8k")
    parser.add_argument("--input-len", type=span, metavar="N[-M]", help="tokens of random prompts")
    parser.add_argument("--common", type=int, default=0, help="tokens that all prompts start with")
    parser.add_argument("--output-len", type=span, metavar="N[-M]", default=(64, 64))
    args = parser.parse_intermixed_args()
    if args.input_len is None and args.model not in DEMOS and not args.data:
        args.input_len = 32, 32
    if args.input_len is None and args.common:
        parser.error("--common needs --input-len: demo questions have no tokens in common")
    if args.records and args.input_len is not None:
        parser.error("--records needs a demo model, and no --input-len")
    try:
        found = table(args)
    except (ValueError, OSError) as error:  # of an option: what it says is enough
        parser.error(str(error))
    print(f"{paired.clock_of(args).label}, {args.requests} requests, {args.repeats} turns")
    print(found)


if __name__ == "__main__":
    main()
