"""Runs diffray beside its peers: `python -m benchmarks.peers --fast-dllm FOLDER ...`.

    git clone https://github.com/NVlabs/Fast-dLLM
    git clone https://github.com/ML-GSAI/LLaDA
    git clone https://github.com/ZHZisZZ/dllm
    python -m benchmarks.peers --fast-dllm Fast-dLLM --llada LLaDA \
        --llada2-code dllm/dllm/pipelines/llada2/models

dlmserve and dfastllm are served, each in an environment of its own, beside `diffray serve`;
diffusers' LLaDA2 pipeline runs in an environment of its own beside the engine; Fast-dLLM and
LLaDA's sampler run in one process with the engine. docs/benchmarks.md says how to read the tables.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import checkpoint, plan, servers
from benchmarks.peers.environments import Environment, environments

LEAST_REQUESTS = 4  # of a turn
PIPELINE_ROWS = 8  # that the engine runs at once beside diffusers' pipeline


def serve_and_compare(
    peers: list[str], args: argparse.Namespace, made: dict[str, Environment]
) -> None:
    from benchmarks.peers import served, table

    code = checkpoint.code_folder(args.fast_dllm, checkpoint.LLADA_CODE)
    model = args.folder.resolve() / f"llada-{args.hidden}x{args.layers}-{args.seed}"
    if not (model / "tokenizer_config.json").is_file():
        sizes = {"layers": args.layers, "hidden": args.hidden, "seed": args.seed}
        checkpoint.write_llada(model, code, **sizes)
    setting = servers.Setting(
        model, args.threads, args.gen_length, args.steps, max(args.concurrency)
    )
    recipes = [servers.our_recipe(setting, servers.free_port())]
    makers = {"dlmserve": servers.dlmserve_recipe, "dfastllm": servers.dfastllm_recipe}
    recipes += [makers[name](setting, servers.free_port(), made[name]) for name in peers]
    contenders = servers.contenders(setting, peers, args.block_length)
    shortest, longest = args.prompt_length
    print(
        f"{model.name}, float32, {args.threads} threads, prompts of"
        f" {shortest} to {longest} tokens, {args.gen_length} new tokens"
        f" in {args.steps} steps, {args.turns} turns"
    )
    print(table.HEAD, flush=True)
    notes = []
    with servers.running(recipes, args.folder / "logs") as started:
        for concurrency in args.concurrency:
            count = args.requests or max(LEAST_REQUESTS, concurrency)
            before = served.work(started)
            results = served.compare(
                contenders,
                started,
                served.prompts(count, shortest, longest, args.seed),
                concurrency=concurrency,
                gen_length=args.gen_length,
                turns=args.turns,
            )
            print("\n".join(table.served_rows(concurrency, contenders, results)), flush=True)
            for name, work in served.work(started).items():
                rows = work.rows_per_forward(before[name])
                notes.append(f"{name} at concurrency {concurrency}: {rows:.2f} rows a forward")
    print("\n".join(notes), flush=True)


def compare_pipeline(args: argparse.Namespace, environment: Environment) -> None:
    import torch

    from benchmarks.peers import offline
    from diffray import DiffusionLLM
    from examples.train_demo.tasks import held_out_items

    code = checkpoint.code_folder(args.llada2_code, checkpoint.LLADA2_CODE)
    folder = args.folder.resolve() / f"{Path(args.llada2).name}-with-code"
    checkpoint.copy_llada2(args.llada2, folder, code)
    torch.set_num_threads(args.threads)
    with DiffusionLLM(
        args.llada2,
        dtype="float32",
        max_num_seqs=PIPELINE_ROWS,
        enable_prefix_caching=False,  # prompts come again, and should find nothing of theirs
    ) as llm:
        items = held_out_items(args.questions, seed=args.seed)
        prompts = [offline.encode(llm, item.question) for item in items]
        mask_id = llm.engine.limits.mask_token_id
        with offline.pipeline(environment, folder, args.threads, mask_id) as peer:
            rows = offline.compare(llm, peer, prompts, wanted=args.gen_length, turns=args.turns)
    said = f"{args.questions} prompts, all at once is {PIPELINE_ROWS} at once"
    print(f"{args.llada2}, float32, {args.threads} threads, {said}")
    print(offline.HEAD, *rows, sep="\n", flush=True)


def in_one_process(name: str, args: argparse.Namespace) -> None:
    """Run the script of a peer that shares the engine's process."""
    here = [sys.executable, "-m"]
    shared = ["--threads", str(args.threads)]
    if name == "fast-dllm":
        command = [*here, "benchmarks.compare_fast_dllm", "--fast-dllm", str(args.fast_dllm)]
        command += ["--ragged", "16"]
    else:
        command = [*here, "benchmarks.compare_sampler", "--llada", str(args.llada)]
    if subprocess.run([*command, *shared]).returncode:
        raise ValueError(f"{name} could not be compared; what it said stands above")


def run(args: argparse.Namespace) -> None:
    peers = plan.chosen(args)
    plan.check(args)
    made = environments(args.folder.resolve())
    for name in peers:
        if name in made:
            made[name].make()
    if args.make_only:
        return
    served_peers = [name for name in peers if name in plan.SERVERS]
    if served_peers:
        serve_and_compare(served_peers, args, made)
    if "diffusers" in peers:
        compare_pipeline(args, made["diffusers"])
    for name in ("fast-dllm", "sampler"):
        if name in peers:
            in_one_process(name, args)


def main() -> None:
    parser = plan.parser()
    args = parser.parse_args()
    # So that servers are ended then too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run(args)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
