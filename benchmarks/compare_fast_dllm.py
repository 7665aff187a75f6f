"""Compare this engine with Fast-dLLM's own code: same weights, prompts and threads, on CPU.

    git clone https://github.com/NVlabs/Fast-dLLM
    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.compare_fast_dllm --fast-dllm Fast-dLLM tests/golden/llada /tmp/llada-100m

Both decode with threshold 0.9, the dual cache and blocks of 32. First Fast-dLLM must reproduce its
golden cases, which shows that it is run as it should be. Then the systems take turns. All tokens
count, and the prompt's forward is included. With `--ragged N` there are N requests more, of prompts
and answers of all lengths: the engine runs them as they come, as many at once as the largest batch,
and Fast-dLLM one by one, as its batches are of prompts of one length. The environment's
TORCHDYNAMO_DISABLE=1 leaves out the torch.compile around Fast-dLLM's attention, which slowed it on
the golden checkpoint.
"""

import argparse
import importlib
import json
import random
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks import paired
from benchmarks.golden import GOLDEN, cases_of
from diffray import DiffusionLLM, SamplingParams

THRESHOLD, BLOCK_LENGTH = 0.9, 32


class Answer(NamedTuple):
    """Each row's tokens, and how many forwards each row took part in."""

    tokens: list[list[int]]
    forwards: list[int]


class Work(NamedTuple):
    """Prompts, and how many tokens to write after each."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1 or len(set(map(len, self.prompts))) > 1


class FastDLLM:
    """Fast-dLLM's generate functions on one checkpoint, from a checkout of its repository."""

    def __init__(self, checkout: Path, checkpoint: Path) -> None:
        source = next(
            (f for f in (checkout / "v1" / "llada", checkout / "llada") if f.is_dir()), None
        )
        if source is None:
            raise ValueError(f"{checkout} has neither v1/llada nor llada: not Fast-dLLM's checkout")
        # Early versions import einops, and use it nowhere that is reached.
        sys.modules.setdefault("einops", types.SimpleNamespace(rearrange=None))  # type: ignore[arg-type]
        sys.path.insert(0, str(source))
        self.functions: Any = importlib.import_module("generate")
        config_class: Any = importlib.import_module("model.configuration_llada").LLaDAConfig
        model_class: Any = importlib.import_module("model.modeling_llada").LLaDAModelLM
        sys.path.remove(str(source))
        # transformers 5 no longer keeps these on every configuration.
        config_class.use_cache, config_class.use_return_dict = False, True
        config = json.loads((checkpoint / "config.json").read_text())
        self.mask_id = int(config["mask_token_id"])
        self.model = model_class(config_class(**config)).eval()
        weights = {n: w.float() for n, w in load_file(checkpoint / "model.safetensors").items()}
        self.model.load_state_dict(weights)

    def run(
        self,
        prompts: list[list[int]],
        gen_length: int,
        block_length: int = BLOCK_LENGTH,
        *,
        cache: str = "dual",
        steps: int | None = None,
        **rule: float,
    ) -> Answer:
        """Run one batch; `rule` is its threshold or factor, none the fixed schedule."""
        name = {"none": "generate", "prefix": "generate_with_prefix_cache"}.get(
            cache, "generate_with_dual_cache"
        )
        canvas, forwards = getattr(self.functions, name)(
            self.model,
            torch.tensor(prompts),
            steps=steps or gen_length,
            gen_length=gen_length,
            block_length=block_length,
            mask_id=self.mask_id,
            **rule,
        )
        return Answer(canvas[:, len(prompts[0]) :].tolist(), [forwards] * len(prompts))

    def run_one_by_one(self, work: Work) -> Answer:
        rows = [self.run([p], n, threshold=THRESHOLD) for p, n in zip(*work, strict=True)]
        return Answer([r.tokens[0] for r in rows], [r.forwards[0] for r in rows])

    def run_batched(self, work: Work) -> Answer:
        return self.run(work.prompts, work.lengths[0], threshold=THRESHOLD)

    def best_runner(self, work: Work) -> Callable[[Work], Answer]:
        """Return its own batched call where that gives every row what the row gets alone."""
        if len(work.prompts) == 1:
            return self.run_batched
        if work.ragged:
            return self.run_one_by_one
        try:
            batched = self.run_batched(work).tokens
        except (RuntimeError, IndexError) as error:
            print(f"Fast-dLLM cannot run this batch ({error}): one by one", file=sys.stderr)
            return self.run_one_by_one
        if batched != self.run_one_by_one(work).tokens:
            print("Fast-dLLM's rows differ from the same rows alone", file=sys.stderr)
        return self.run_batched


def check_golden(checkout: Path) -> str:
    """Reproduce the golden cases that come from Fast-dLLM; returns how many agree."""
    system = FastDLLM(checkout, GOLDEN / "llada")
    cases = [case for case in cases_of("llada") if case["source"] == "fast-dllm"]
    equal = fewer = 0
    for case in cases:
        given = {name: case[name] for name in ("steps", "threshold") if name in case}
        found = system.run(
            [case["prompt"]],
            case["gen_length"],
            case["block_length"],
            cache=case["cache"],
            **given,
        )
        equal += found.tokens[0] == case["tokens"]
        fewer += found.forwards[0] < case["forwards"]
    return f"Fast-dLLM reproduces {equal} of its {len(cases)} golden cases ({fewer} sooner)"


def ours(llm: DiffusionLLM, work: Work) -> Answer:
    diffusion = {
        "block_length": BLOCK_LENGTH,
        "iteration": {"kind": "blockwise"},
        "decoder": {"kind": "threshold", "threshold": THRESHOLD},
        "cache": {"kind": "dual"},
    }
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, diffusion=diffusion)
        for length in work.lengths
    ]
    found = llm.generate(work.prompts, params, use_tqdm=False)
    return Answer([row.outputs[0].token_ids for row in found], [row.forwards for row in found])


def all_work(mask_id: int, args: argparse.Namespace) -> list[Work]:
    """Return the batches, and the ragged requests behind them."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (max(args.batches), args.prompt_length)
    # The last two ids are the mask and the end of text.
    prompts = torch.randint(0, mask_id, shape, generator=generator).tolist()
    work = [Work(prompts[:batch], [args.gen_length] * batch) for batch in args.batches]
    if args.ragged:
        draws = random.Random(args.seed)
        prompts = [
            draws.choices(range(mask_id), k=draws.randint(16, 96)) for _ in range(args.ragged)
        ]
        # Fast-dLLM writes whole blocks only.
        work.append(Work(prompts, [BLOCK_LENGTH * draws.randint(1, 4) for _ in prompts]))
    return work


def compare(
    checkout: Path, checkpoint: Path, args: argparse.Namespace, clock: paired.Clock
) -> None:
    """Print one row of the table for each batch, and one for the ragged requests."""
    theirs = FastDLLM(checkout, checkpoint)
    most = max(args.batches)
    with DiffusionLLM(str(checkpoint), dtype="float32", max_num_seqs=most) as llm:
        for work in all_work(theirs.mask_id, args):
            runner = theirs.best_runner(work)
            last: dict[str, Answer] = {}
            systems = {"diffray": partial(ours, llm, work), "Fast-dLLM": partial(runner, work)}

            def act(_: int, name: str, call: Callable[[], Answer], last: Any = last) -> Any:
                last[name] = call()
                return last[name].tokens

            contenders = {
                name: clock.timed(partial(act, name=name, call=call))
                for name, call in systems.items()
            }
            turns = paired.take_turns(contenders, args.repeats)
            many = f"{len(work.prompts)} ragged" if work.ragged else f"{len(work.prompts)}"
            one_by_one = runner == theirs.run_one_by_one
            cells: list[str] = []
            for name, all_ in turns.items():
                forwards = sum(last[name].forwards) / len(last[name].forwards)
                own = all_[-1].tokens / len(all_[-1].answers) / forwards
                cells += [paired.rate(all_), f"{forwards:.1f}", f"{own:.2f}"]
            mine, their = turns.values()
            print(
                paired.row(
                    checkpoint.name,
                    f"{many}{' (Fast-dLLM one by one)' if one_by_one else ''}",
                    *cells,
                    paired.ratio(paired.rates(mine), paired.rates(their)),
                    paired.equal_tokens(mine[-1], their[-1]),
                ),
                flush=True,
            )


HEAD = paired.head(
    *("checkpoint", "batch", "diffray tok/s", "forwards a row", "tokens a forward"),
    *("Fast-dLLM tok/s", "forwards a row", "tokens a forward", "speed ratio", "equal tokens"),
)


def main() -> None:
    parser = paired.parser(__doc__, turns=5)
    parser.add_argument("checkpoints", type=Path, nargs="*", default=[GOLDEN / "llada"])
    parser.add_argument("--fast-dllm", type=Path, required=True, help="a checkout of Fast-dLLM")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ragged", type=int, default=0, metavar="N", help="unequal requests")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--gen-length", type=int, default=128)
    args = parser.parse_args()
    clock = paired.clock_of(args)
    print(check_golden(args.fast_dllm))
    print(f"{clock.said}, prompts of {args.prompt_length}, {args.gen_length} new tokens")
    print(HEAD)
    for checkpoint in args.checkpoints:
        compare(args.fast_dllm, checkpoint, args, clock)


if __name__ == "__main__":
    main()
