"""Compare this engine with Fast-dLLM's own code: same weights, prompts and threads, on CPU.

    git clone https://github.com/NVlabs/Fast-dLLM
    python -m benchmarks.random_checkpoint /tmp/llada-100m
    python -m benchmarks.compare_fast_dllm --fast-dllm Fast-dLLM tests/golden/llada /tmp/llada-100m

Both decode with threshold 0.9, the dual cache and blocks of 32. First Fast-dLLM must reproduce its
golden cases, which shows that it is run as intended. Then the systems take turns. All tokens count,
and the prompt's forward is included. `--ragged N` adds N requests with prompts and answers of all
lengths: the engine runs as many at once as the largest batch, Fast-dLLM one by one, because the
prompts of its batches have one length. TORCHDYNAMO_DISABLE=1 in the environment disables the
torch.compile around Fast-dLLM's attention, which slowed it on the golden checkpoint.
"""

import argparse
import importlib
import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks import paired
from benchmarks.golden import cases_of
from benchmarks.random_checkpoint import GOLDEN
from diffray import DiffusionLLM, SamplingParams

THRESHOLD, BLOCK_LENGTH = 0.9, 32
FUNCTIONS = {
    "none": "generate",
    "prefix": "generate_with_prefix_cache",
    "dual": "generate_with_dual_cache",
}
DIFFUSION = {
    "block_length": BLOCK_LENGTH,
    "iteration": {"kind": "blockwise"},
    "decoder": {"kind": "threshold", "threshold": THRESHOLD},
    "cache": {"kind": "dual"},
    "canvas": "fixed",
}
HEAD = paired.head(
    *("checkpoint", "batch", "diffray tok/s", "forwards a row", "tokens a forward"),
    *("Fast-dLLM tok/s", "forwards a row", "tokens a forward", "speed ratio", "equal tokens"),
)


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
        folders = (checkout / "v1" / "llada", checkout / "llada")
        source = next(filter(Path.is_dir, folders), None)
        if source is None:
            raise ValueError(f"{checkout} has neither v1/llada nor llada: not Fast-dLLM's checkout")
        # Early versions import einops, but no code that runs here uses it.
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
        self, prompts: list[list[int]], length: int, cache: str = "dual", **options: float
    ) -> paired.Answers:
        """Run one batch of prompts of one length."""
        canvas, forwards = getattr(self.functions, FUNCTIONS[cache])(
            self.model,
            torch.tensor(prompts),
            gen_length=length,
            mask_id=self.mask_id,
            **{"steps": length, "block_length": BLOCK_LENGTH} | options,
        )
        return paired.Answers(canvas[:, len(prompts[0]) :].tolist(), [forwards] * len(prompts))

    def one_by_one(self, work: Work) -> paired.Answers:
        runs = [self.run([p], n, threshold=THRESHOLD) for p, n in zip(*work, strict=True)]
        return paired.Answers([run.rows[0] for run in runs], [run.forwards[0] for run in runs])

    def batched(self, work: Work) -> paired.Answers:
        return self.run(work.prompts, work.lengths[0], threshold=THRESHOLD)

    def best_runner(self, work: Work) -> Callable[[Work], paired.Answers]:
        """Return Fast-dLLM's batched call, unless it fails or the prompts are ragged."""
        if len(work.prompts) == 1:
            return self.batched
        if work.ragged:
            return self.one_by_one
        try:
            batched = self.batched(work).rows
        except (RuntimeError, IndexError) as error:
            print(f"Fast-dLLM cannot run this batch ({error}); one by one", file=sys.stderr)
            return self.one_by_one
        if batched != self.one_by_one(work).rows:
            print("Fast-dLLM's rows differ from the same rows run alone", file=sys.stderr)
        return self.batched


def check_golden(checkout: Path) -> str:
    """Reproduce the golden cases that come from Fast-dLLM; return how many agree."""
    system = FastDLLM(checkout, GOLDEN / "llada")
    cases = [case for case in cases_of("llada") if case["source"] == "fast-dllm"]
    equal = fewer = 0
    for case in cases:
        names = ("steps", "threshold", "block_length")
        options = {name: case[name] for name in names if name in case}
        found = system.run([case["prompt"]], case["gen_length"], case["cache"], **options)
        equal += found.rows[0] == case["tokens"]
        fewer += found.forwards[0] < case["forwards"]
    sooner = f"{fewer} in fewer forwards"
    return f"Fast-dLLM reproduces {equal} of its {len(cases)} golden cases ({sooner})"


def all_work(mask_id: int, args: argparse.Namespace) -> list[Work]:
    """Return the batches, then the ragged requests; the ids from `mask_id` on are special."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (max(args.batches), args.prompt_length)
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
    llm: DiffusionLLM, theirs: FastDLLM, work: Work, clock: paired.Clock, turns: int
) -> list[str]:
    """Return the cells of the table's row."""
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, diffusion=DIFFUSION)
        for length in work.lengths
    ]
    runner = theirs.best_runner(work)
    contenders = {
        "diffray": clock.timed(lambda _: paired.generate(llm, work.prompts, params)),
        "Fast-dLLM": clock.timed(lambda _: runner(work)),
    }
    found = list(paired.take_turns(contenders, turns).values())
    one_by_one = " (Fast-dLLM one by one)" if runner == theirs.one_by_one else ""
    cells = [f"{len(work.prompts)}{' ragged' if work.ragged else ''}{one_by_one}"]
    for all_ in found:
        last, forwards = all_[-1], sum(all_[-1].forwards)
        each = f"{forwards / len(last.rows):.1f}", f"{last.tokens / forwards:.2f}"
        cells += [paired.rate(all_), *each]
    return [*cells, paired.speedup(*found), paired.equal_tokens(*found)]


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
    print(f"{clock.label}, prompts of {args.prompt_length}, {args.gen_length} new tokens")
    print(HEAD)
    for checkpoint in args.checkpoints:
        theirs = FastDLLM(args.fast_dllm, checkpoint)
        most = max(args.batches)
        with DiffusionLLM(str(checkpoint), dtype="float32", max_num_seqs=most) as llm:
            for work in all_work(theirs.mask_id, args):
                cells = compare(llm, theirs, work, clock, args.repeats)
                print(paired.row(checkpoint.name, *cells), flush=True)


if __name__ == "__main__":
    main()
