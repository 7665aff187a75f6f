"""Compares settings of one engine: they take turns at the same work, and ratios are to the first.

    python -m benchmarks.ablate demo "" decoder=lopa "decoder=threshold decoder.threshold=0.7"
    python -m benchmarks.ablate demo at_once=1 at_once=8
    python -m benchmarks.ablate /tmp/llada-100m "" quantization=int8 quantization=w8a8
    python -m benchmarks.ablate demo-llada2 --input-len 32 --common 512 --questions 4 \
        enable_prefix_caching=false enable_prefix_caching=true

A setting is a quoted list of NAME=VALUE. Names are options of a request, as with `--set` of
`diffray generate`, `at_once` (how many requests run together), or options of `DiffusionLLM`;
`--all` holds what is the same for all settings. A value may be JSON without spaces, or @FILE. A
list of adapters (`lora=["a","b"]`) goes round the requests.

A demo model answers held-out questions to their end. Other models, and demo models with
`--input-len`, continue random ids, and end tokens are ignored. Every turn has its own prompts.
"""

import argparse
import json
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import paired
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.datasets import random_ids
from diffray.cluster.cli.request_options import DIFFUSION, put_setting
from diffray.components.checkpoints.demos import DEMOS
from diffray.components.checkpoints.info import describe
from examples.train_demo.tasks import chat, held_out_items

OF_REQUESTS = {*DIFFUSION, *SamplingParams.model_fields}
COLUMNS = "setting", "weights, MB", "s", "tokens/s", "to the first", "forwards", "cached", "equal"


class Setting(NamedTuple):
    """The options of one contender."""

    at_once: int
    engine: dict[str, Any]
    request: dict[str, Any]

    @property
    def key(self) -> str:
        """Settings with the same key share an engine."""
        return json.dumps(self.engine, sort_keys=True)


class Work(NamedTuple):
    """What all contenders do in one turn: conversations, mostly of one question."""

    firsts: list[list[int]]
    later: list[list[list[int]]]  # the tokens that continue each conversation, by question
    lengths: list[int]  # the limits of the answers


class Turn(NamedTuple):
    """The answers of one turn, and what they took."""

    seconds: float
    rows: list[list[int]]
    forwards: int
    cached: float  # the share of the prompts' tokens that was read from shared pages

    @property
    def rate(self) -> float:
        return sum(map(len, self.rows)) / self.seconds


def span(text: str) -> tuple[int, int]:
    """Read a number, or the least and the most: 16-96."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def parse(text: str, at_once: int) -> Setting:
    """Read a setting such as `dtype=float64 decoder.threshold=0.8`."""
    found: dict[str, Any] = {"at_once": at_once}
    engine: dict[str, Any] = {"dtype": "float32"}
    request: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if value.startswith("@"):
            part = f"{name}={Path(value[1:]).read_text()}"
        if name in found:
            found[name] = int(value)
        elif (first := name.partition(".")[0]) in OF_REQUESTS:
            put_setting(request, part)
        else:
            engine.pop(first, None)
            put_setting(engine, part)
    return Setting(found["at_once"], {"max_num_seqs": found["at_once"]} | engine, request)


def draw(llm: DiffusionLLM, args: argparse.Namespace, number: int) -> Work:
    """Return a turn's work, the same for the same seed and number."""
    seed = 1000 * args.seed + number
    draws = random.Random(seed)
    lengths = [draws.randint(*args.output_len) for _ in range(args.requests)]
    if args.input_len is None:
        assert llm.tokenizer is not None
        items = held_out_items(args.requests, seed)
        return Work([llm.tokenizer.encode_chat(chat(item)) for item in items], [], lengths)
    longest = random_ids(llm, args.requests, args.input_len[1], seed, args.common)
    cuts = [draws.randint(*args.input_len) for _ in longest]
    firsts = [ids[: args.common + cut] for ids, cut in zip(longest, cuts, strict=True)]
    later = [
        random_ids(llm, args.requests, args.input_len[0], seed + 100 * question)
        for question in range(1, args.questions)
    ]
    return Work(firsts, later, lengths)


def carry_out(
    llm: DiffusionLLM, setting: Setting, work: Work, ends: bool, clock: paired.Clock
) -> Turn:
    """Run all conversations; before the next question of one, all others ask theirs."""
    adapters = setting.request.get("lora", "")
    params = [
        SamplingParams(
            **{"max_tokens": length, "ignore_eos": not ends, "seed": row}
            | setting.request
            | {"lora": adapters[row % len(adapters)] if isinstance(adapters, list) else adapters}
        )
        for row, length in enumerate(work.lengths)
    ]
    histories = [list(first) for first in work.firsts]
    rows: list[list[int]] = []
    forwards = cached = asked = 0
    llm.engine.kv.forget_prefixes()  # those of a setting that shares the engine
    begin = clock.read()
    no_more: list[list[int]] = [[]] * len(histories)
    for added in (no_more, *work.later):
        for history, question in zip(histories, added, strict=True):
            history += question
        for start in range(0, len(histories), setting.at_once):
            places = range(start, min(start + setting.at_once, len(histories)))
            prompts = [histories[place] for place in places]
            outputs = llm.generate(prompts, [params[each] for each in places], use_tqdm=False)
            for place, output in zip(places, outputs, strict=True):
                rows += [choice.token_ids for choice in output.outputs]
                forwards += output.forwards
                cached += output.cached_tokens
                asked += output.prompt_tokens
                histories[place] = histories[place] + output.outputs[0].token_ids
    return Turn(clock.read() - begin, rows, forwards, cached / asked)


def table(args: argparse.Namespace) -> list[str]:
    """Run all settings; return the rows of the table."""
    clock = paired.clock_of(args)
    settings = {text: parse(f"{args.all} {text}", args.at_once) for text in args.settings}
    engines: dict[str, DiffusionLLM] = {}
    with ExitStack() as stack:
        for each in settings.values():
            if each.key not in engines:
                engines[each.key] = stack.enter_context(DiffusionLLM(args.model, **each.engine))

        def contender(setting: Setting) -> Any:
            llm, ends = engines[setting.key], args.input_len is None
            return lambda number: carry_out(llm, setting, draw(llm, args, number), ends, clock)

        contenders = {text: contender(setting) for text, setting in settings.items()}
        found = paired.take_turns(contenders, args.repeats)
    base = next(iter(found.values()))
    rows = []
    for text, turns in found.items():
        engine, last = settings[text].engine, turns[-1]
        size = describe(args.model, engine.get("quantization")).bytes_in_memory[engine["dtype"]]
        same = sum(map(list.__eq__, last.rows, base[-1].rows))
        cells = (
            f"{size / 1e6:.0f}",
            f"{median(turn.seconds for turn in turns):.2f}",
            f"{median(turn.rate for turn in turns):.1f}",
            paired.ratio([turn.rate for turn in turns], [turn.rate for turn in base]),
            last.forwards,
            f"{last.cached:.0%}",
            f"{same}/{len(last.rows)}",
        )
        rows.append(paired.row(f"`{text}`" if text else "defaults", *cells))
    return rows


def main() -> None:
    parser = paired.parser(__doc__, turns=3)
    parser.add_argument("model", help="a demo model or a folder")
    parser.add_argument("settings", nargs="+", metavar="SETTING")
    parser.add_argument("--all", default="", metavar="SETTING", help="what all settings share")
    parser.add_argument("--requests", type=int, default=8, help="of a turn")
    parser.add_argument("--at-once", type=int, default=8, help="requests that run together")
    parser.add_argument("--input-len", type=span, metavar="N[-M]", help="tokens of random prompts")
    parser.add_argument("--common", type=int, default=0, help="tokens that all prompts start with")
    parser.add_argument("--questions", type=int, default=1, help="of each conversation")
    parser.add_argument("--output-len", type=span, metavar="N[-M]", default=(64, 64))
    args = parser.parse_intermixed_args()
    if args.input_len is None and args.model not in DEMOS:
        args.input_len = 32, 32
    if args.input_len is None and (args.common or args.questions > 1):
        parser.error("--common and --questions need --input-len: demo questions stand alone")
    try:
        rows = table(args)
    except (ValueError, OSError) as error:  # of an option: what it says is enough
        parser.error(str(error))
    print(f"{paired.clock_of(args).label}, {args.requests} requests, {args.repeats} turns")
    print(paired.head(*COLUMNS))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
