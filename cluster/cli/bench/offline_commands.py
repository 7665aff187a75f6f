"""`diffray bench latency` and `diffray bench throughput`: an engine in this process, no server."""

from diffray.cluster.cli import flags
from diffray.cluster.cli.bench import flags as own
from diffray.cluster.cli.failures import one_sentence
from diffray.cluster.cli.flag_records import spread

MOST_AT_ONCE = 64
EACH_ITS_OWN = flags.Engine(enable_prefix_caching=False)  # prompts are repeated, for their time
SHORT_PROMPTS = own.Data(input_len=128)


@spread
def latency(
    *,
    model: flags.Model = "demo",
    engine: flags.Engine = EACH_ITS_OWN,
    batch_size: own.BatchSize = "8",
    input_len: own.InputLen = 32,
    output_len: own.OutputLen = 128,
    num_iters_warmup: own.Warmup = 10,
    num_iters: own.Iterations = 30,
    steps_per_round: own.StepsPerRound = 1,
    seed: own.Seed = 0,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: own.Result,
) -> None:
    """Measure the latency of batches of random prompts with answers of equal length."""
    with one_sentence():
        from diffray.cluster.cli.bench import offline_runs as runs
        from diffray.cluster.cli.bench.interrupt import Interruptible
        from diffray.cluster.cli.bench.machine import engine_facts, when_and_where
        from diffray.cluster.cli.bench.offline import Looked
        from diffray.cluster.cli.bench.output import print_found
        from diffray.cluster.cli.bench.percentiles import counts
        from diffray.cluster.cli.bench.places import check_place
        from diffray.cluster.cli.bench.workload import facts_of, random_ids
        from diffray.cluster.cli.request_options import sampling_params
        from diffray.cluster.control.llm import DiffusionLLM

        facts = when_and_where()
        check_place(result.output_json, "--output-json")
        check_place(result.report, "--report")
        sizes = counts(batch_size, "--batch-size", high=MOST_AT_ONCE)
        most, steps = max(sizes), steps_per_round
        typed = flags.typed_request(
            sampling, diffusion, max_tokens=output_len, seed=seed, ignore_eos=True
        )
        params = sampling_params(typed, diffusion.settings or ())
        options = engine.typed() | {"max_num_seqs": most, "steps_per_round": steps}
        found: list[Looked] = []
        times, warmups = num_iters, num_iters_warmup
        with Interruptible() as timing, DiffusionLLM(model, **options) as llm:
            facts |= engine_facts(llm, model) | {"steps per round": str(steps)}
            work = random_ids(llm, most, input_len, seed), [params] * most
            facts |= facts_of(llm, params, {"a batch": work})
            runs.run_batches(llm, sizes, work, found, warmups=warmups, times=times)
        if found:
            print_found(found, "batch")
            facts |= timing.facts(len(found), len(sizes))
            runs.write_json(result.output_json, facts, runs.batches_as_json(sizes, found))
        if found and result.report is not None:
            from diffray.cluster.cli.bench.report import latency_report

            result.report.write_text(latency_report(facts, sizes[: len(found)], found))
        timing.end(len(found), len(sizes))


@spread
def throughput(
    *,
    model: flags.Model = "demo",
    engine: flags.Engine = EACH_ITS_OWN,
    data: own.Data = SHORT_PROMPTS,
    raw: flags.Raw = False,
    max_num_seqs: own.MaxNumSeqs = 16,
    steps_per_round: own.StepsPerRound = 1,
    seed: own.Seed = 0,
    sampling: flags.Sampling,
    diffusion: flags.Diffusion,
    result: own.Result,
) -> None:
    """Measure the throughput over data sets; --max-num-seqs 1 runs one prompt at a time."""
    with one_sentence():
        from diffray.cluster.cli.bench import offline_runs as runs
        from diffray.cluster.cli.bench.interrupt import Interruptible
        from diffray.cluster.cli.bench.machine import engine_facts, when_and_where
        from diffray.cluster.cli.bench.offline import Looked
        from diffray.cluster.cli.bench.output import print_found
        from diffray.cluster.cli.bench.places import check_place
        from diffray.cluster.cli.bench.prompts import read_sets
        from diffray.cluster.cli.bench.workload import facts_of, tasks
        from diffray.cluster.cli.request_options import sampling_params
        from diffray.cluster.control.llm import DiffusionLLM

        facts = when_and_where()
        check_place(result.output_json, "--output-json")
        check_place(result.report, "--report")
        sets = read_sets(data)
        ends = data.ignore_eos or None
        typed = flags.typed_request(
            sampling, diffusion, max_tokens=data.output_len, seed=seed, ignore_eos=ends
        )
        params = sampling_params(typed, diffusion.settings or ())
        most, steps = max_num_seqs, steps_per_round
        options = engine.typed() | {"max_num_seqs": most, "steps_per_round": steps}
        found: list[Looked] = []
        work: dict[str, runs.Work] = {}
        with Interruptible() as timing, DiffusionLLM(model, **options) as llm:
            facts |= engine_facts(llm, model)
            facts |= {"steps per round": str(steps), "sequences at once": str(most)}
            work |= tasks(llm, sets, data, seed=seed, raw=raw, params=params)
            facts |= facts_of(llm, params, work)
            runs.run_tasks(llm, work, found, at_once=most)
        if found:
            print_found(found, "task")
            facts |= timing.facts(len(found), len(work))
            runs.write_json(result.output_json, facts, runs.tasks_as_json(found))
        if found and result.report is not None:
            from diffray.cluster.cli.bench.report import throughput_report

            result.report.write_text(throughput_report(facts, found))
        timing.end(len(found), len(work))
