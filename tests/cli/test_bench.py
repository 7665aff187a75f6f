"""The benchmarks count, time and print what they say; on toys, and once on the demo model."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from typer.testing import CliRunner, Result

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench import offline, roofline
from diffray.cluster.cli.bench.counters import between, parse
from diffray.cluster.cli.bench.datasets import BUNDLED, Data, read_rows, tasks
from diffray.cluster.cli.bench.offline import counted, look_at, timed
from diffray.cluster.cli.bench.phases import CACHE, DECODE, HOST, MODEL, phases_of
from diffray.cluster.cli.bench.results import percentile
from diffray.cluster.cli.bench.roofline import Reads, reads_of
from diffray.cluster.cli.bench.sweep import counts
from diffray.cluster.cli.main import app
from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.messages import Request
from diffray.workers.output import CompletionOutput, RequestOutput
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.toy import ToyModel, drain, prompt_of, toy_engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", "llada_moe")


@pytest.fixture(scope="module")
def llm(tiny: str) -> DiffusionLLM:
    return DiffusionLLM(tiny)


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.ARRAY, "cpu", 1 << 20)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def places(folder: Path) -> tuple[str, ...]:
    return "--output-json", str(folder / "o.json"), "--report", str(folder / "o.html")


def measured(command: str, folder: Path, *arguments: str) -> Any:
    result = bench(command, *arguments, *places(folder))
    assert result.exit_code == 0, result.output
    return json.loads((folder / "o.json").read_text())["runs"], (folder / "o.html").read_text()


def test_percentiles_are_between_the_two_nearest_and_lists_are_checked() -> None:
    for numbers, share, found in (
        ([4, 1, 3, 2], 50, 2.5), ([1, 2, 3, 4, 5], 99, 4.96), ([7], 99, 7), ([1, 2], 100, 2),
        ([], 50, 0),
    ):  # fmt: skip
        assert percentile(numbers, share) == pytest.approx(found)
    assert counts("1,8,64", "--batch-size", high=64) == [1, 8, 64]
    for wrong in ("0", "65", "a", "1.5", "", "1,inf"):
        with pytest.raises(ValueError, match="--batch-size"):
            counts(wrong, "--batch-size", high=64)


def test_bundled_data_sets_and_files_of_sharegpt_are_read(tmp_path: Path) -> None:
    assert [len(read_rows(name, None, 1000)) for name in BUNDLED] == [96, 164, 256]
    assert len(read_rows("humaneval", None, 5)) == 5
    assert read_rows("gsm8k", None, 1)[0].prompt.startswith("Janet")
    tasks = {"arithmetic", "math", "code", "json", "rewriting", "outside"}
    assert {ask.task for ask in read_rows("demo", None, 99)} == tasks
    share = tmp_path / "share.json"
    said = [{"value": "hi"}, {"value": "ho"}]
    lines = ["no", {}, {"conversations": said}, {"conversations": said[:1]}]
    share.write_text(json.dumps(lines))
    assert [ask.prompt for ask in read_rows("sharegpt", share, 10)] == ["hi"]


class TestPhases:
    def test_phases_add_up_and_tokens_stay(self) -> None:
        requests = [Request(n, prompt_of(9, n), SamplingParams(max_tokens=40)) for n in range(2)]
        plain, watched = toy_engine(ToyModel()), toy_engine(ToyModel())
        for request in requests:
            plain.add(request)
            watched.add(request)
        expected = drain(plain)
        methods = BatchPlan.denoise, BatchPlan.outcomes
        with phases_of(watched) as phases:
            assert drain(watched) == expected
        assert phases.forwards == plain.forwards > 0
        assert set(phases.seconds) == {MODEL, CACHE, DECODE, HOST}
        assert min(phases.seconds.values()) > 0
        assert (BatchPlan.denoise, BatchPlan.outcomes) == methods
        assert not {"forward", "embed", "head"} & set(vars(watched.model))

    def test_time_belongs_to_the_innermost_phase(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = toy_engine(ToyModel())
        now = iter(range(10**6))  # each look at the clock is a second after the last
        monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
        with phases_of(engine) as phases:
            engine.model.embed(torch.tensor([1]))
        assert (phases.seconds[MODEL], phases.seconds[HOST]) == (1, 2)


@pytest.mark.gpu
def test_phases_of_a_device_add_up(tiny: str) -> None:
    with DiffusionLLM(tiny, device="cuda") as llm:
        params = SamplingParams(max_tokens=64, ignore_eos=True, seed=0)
        llm.generate([[1, 2, 3]], params)
        with phases_of(llm.engine) as phases:
            run = timed(llm, "", [([[1, 2, 3]], [params])])
    assert sum(phases.seconds.values()) == pytest.approx(run["seconds"], rel=0.1)


def test_bytes_that_a_step_reads(llm: DiffusionLLM) -> None:
    """Bounds: all experts or one; keys of nothing, as `none` runs every position itself."""
    model = llm.engine.model
    assert isinstance(model, Denoiser)
    width = model.embedding.weight_VH.element_size()
    whole = width * sum(p.numel() for p in model.parameters())
    table = width * model.embedding.weight_VH.numel()
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    routed = width * sum(p.numel() for m in experts for p in m.parameters())

    def look(cache: str) -> Reads:
        params = SamplingParams(
            max_tokens=32, ignore_eos=True, seed=0, diffusion={"cache": cache, "canvas": "fixed"}
        )
        with reads_of(llm.engine) as reads:
            llm.generate([list(range(1, 9))], params, use_tqdm=False)
        return reads

    none, dual = look("none"), look("dual")
    assert none.keys == 0 < dual.keys
    assert whole - table - routed < none.weights / none.forwards <= whole - table
    spec = model.spec
    position = 2 * width * spec.num_layers * spec.num_kv_heads * spec.head_dim
    # Its first step runs all 40 positions, the others the 32 of the block.
    assert dual.keys == (dual.forwards - 1) * 8 * position
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert dual.weights == look("dual").weights  # what is counted ends with the block


class TestCounting:
    @pytest.mark.parametrize(("end", "ignores", "n"), [(9, False, 2), (9, True, 5), (8, False, 5)])
    def test_tokens_before_the_first_end(self, end: int, ignores: bool, n: int) -> None:
        output = RequestOutput(None, [1], [CompletionOutput(0, token_ids=[5, 6, 9, 7, 9])])
        assert counted(output, [end], ignore_eos=ignores) == n

    def test_a_run_counts_shared_forwards_once(self, tiny: str) -> None:
        params = SamplingParams(
            max_tokens=16,
            ignore_eos=True,
            diffusion={"decoder": {"kind": "fixed", "steps": 16}, "canvas": "fixed"},
        )
        with DiffusionLLM(tiny) as llm:
            together = timed(llm, "", [([[1, 2], [3, 4]], [params] * 2)])
            alone = timed(llm, "", [([[1, 2]], [params]), ([[3, 4]], [params])])
        assert (together["tokens"], together["forwards"]) == (32, 16)
        assert (alone["tokens"], alone["forwards"]) == (32, 32)
        assert together["tokens_per_forward"] == alone["tokens_per_forward"] == 1
        assert together["sequence_rate"] is None and alone["sequence_rate"]
        assert alone["seconds"] == pytest.approx(sum(alone["latencies"]))


METRICS = """\
{prefix}diffusion_num_denoising_steps_total{{model_name="m"}} {steps}
{prefix}diffusion_num_canvas_positions_total{{model_name="m"}} {positions}
{prefix}diffusion_num_committed_tokens_total{{model_name="m"}} {committed}
{prefix}diffusion_num_committed_tokens_created{{model_name="m"}} 1.7e9
"""


class TestCounters:
    def test_ours_and_vllms(self) -> None:
        """vLLM takes a step more to commit a canvas, and so its counts hold these."""
        ours = parse(METRICS.format(prefix="diffray:", steps=40, positions=1280, committed=64))
        theirs = parse(METRICS.format(prefix="vllm:", steps=42, positions=1344, committed=64))
        a, b = (between(dict.fromkeys(found, 0.0), found, 2.0) for found in (ours, theirs))
        for name, expected in (("denoising_steps", 40), ("steps_per_canvas", 20)):
            assert a[f"diffusion_{name}"] == b[f"diffusion_{name}"] == expected
        assert a["diffusion_committed_per_step"] == b["diffusion_committed_per_step"] == 1.6
        assert a["diffusion_committed_throughput"] == 32

    def test_only_the_change_counts_and_every_label(self) -> None:
        before = parse(METRICS.format(prefix="diffray:", steps=10, positions=320, committed=20))
        text = METRICS.format(prefix="diffray:", steps=30, positions=960, committed=60)
        after = parse(text + text.replace('"m"', '"n"') + "diffray:num_preemptions_total 3.0\n")
        found = between(before, after, 1.0)
        assert found["diffusion_denoising_steps"] == 60 - 10
        assert found["diffusion_committed_per_step"] == (120 - 20) / 50
        assert found["preemptions"] == 3


class TestOffline:
    def test_latency(self, tiny: str, tmp_path: Path) -> None:
        flags = "--batch-size 1,3 --input-len 8 --output-len 12 --num-iters-warmup 1 --num-iters 2 "
        flags += "--decoder fixed --set decoder.steps=6 --block-length 12 --set canvas=fixed"
        (one, three), page = measured("latency", tmp_path, "--model", tiny, *flags.split())
        assert (one["batch_size"], three["batch_size"]) == (1, 3)
        assert (one["tokens"], one["forwards"], one["tokens_per_forward"]) == (24, 12, 2)
        assert (three["tokens"], three["forwards"], three["tokens_per_forward"]) == (72, 12, 2)
        assert sum(one["split_share"].values()) == pytest.approx(1)
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert one["roofline_share"] > 0
        for foreign in ("<script", "<link", "<img", "@import", "url(", "src="):
            assert foreign not in page
        assert "share" in page and "batch 3" in page

    @pytest.mark.parametrize(
        ("command", "requests"),
        [
            ("latency --batch-size 1,2 --num-iters 2 --num-iters-warmup 1", 3 * (2 + 1 + 2)),
            ("throughput --num-prompts 3 --max-num-seqs 2", 3 + 2 + 2 * 2),
            ("throughput --num-prompts 3 --max-num-seqs 1", 3 + 1 + 2 * 1),
        ],
    )
    def test_progress_counts_every_request(
        self, tiny: str, monkeypatch: pytest.MonkeyPatch, command: str, requests: int
    ) -> None:
        bars: list[Any] = []

        class Shown(tqdm):  # type: ignore[misc]  # tqdm has no types
            def __init__(self, **given: Any) -> None:
                super().__init__(**given | {"disable": False, "file": StringIO()})
                bars.append(self)

        monkeypatch.setattr(offline, "tqdm", Shown)
        flags = "--input-len 4 --output-len 4 --model"
        assert bench(*command.split(), *flags.split(), tiny).exit_code == 0
        (bar,) = bars
        assert bar.n == bar.total == requests

    @pytest.mark.slow
    def test_throughput_by_task(self, tiny: str, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        tasks = zip("xyx", (4, 5, 6), strict=True)
        lines = ({"prompt": "abc", "task": task, "max_tokens": most} for task, most in tasks)
        own.write_text("\n".join(map(json.dumps, lines)))
        flags = "--dataset-name custom,random --num-prompts 3 --input-len 4 --ignore-eos"
        flags += f" --max-num-seqs 1 --model {tiny} --dataset-path {own}"
        # The lengths of a file hold where none is typed.
        for typed, found in (((), (10, 5)), (("--set", "max_tokens=9"), (18, 9))):
            (x, y, chance), _ = measured("throughput", tmp_path, *flags.split(), *typed)
            assert (x["name"], x["requests"], x["tokens"]) == ("x", 2, found[0])
            assert (y["name"], y["requests"], y["tokens"]) == ("y", 1, found[1])
            assert (chance["name"], chance["requests"]) == ("random", 3)
            assert min(run["sequence_rate"] for run in (x, y, chance)) > 0
        assert chance["tokens"] == 3 * 9

    @pytest.mark.parametrize("finished", [0, 1])
    def test_an_interrupt_keeps_finished_batches(
        self, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int
    ) -> None:
        """And their report, which tells what was not typed."""
        looks = iter(range(9))

        def pressed(*arguments: object) -> object:
            if next(looks) == finished:
                raise KeyboardInterrupt
            return look_at(*arguments)  # type: ignore[arg-type]  # handed on as they come

        monkeypatch.setattr(offline, "look_at", pressed)
        flags = "--batch-size 1,2 --num-iters 1 --num-iters-warmup 0 --input-len 8 --output-len 4"
        result = bench("latency", "--model", tiny, *flags.split(), *places(tmp_path))
        assert result.exit_code == 130, result.output
        (line,) = result.stderr.splitlines()
        assert ("after 1 of 2 runs" if finished else "there are no results") in line
        numbers, page = tmp_path / "o.json", tmp_path / "o.html"
        assert page.exists() == numbers.exists() == bool(finished)
        if finished:
            found, asked = json.loads(numbers.read_text()), "prompts of 8 tokens, max_tokens 4"
            facts = found["facts"]
            assert len(found["runs"]) == 1 and "after 1 of 2 runs" in page.read_text()
            assert facts["block length"] == "32" and facts["prefix caching"] == "off"
            parts = ("decoder", "iteration", "cache")
            kinds = [json.loads(facts[part])["kind"] for part in parts]
            assert kinds == ["threshold", "blockwise", "dual"]
            assert asked in facts["requests of a batch"] and asked in page.read_text()


# What is refused before the first run, and parts of the one sentence; OWN is a wrong file.
MISTAKES = [
    ("throughput --dataset-name demo,custom --dataset-path OWN", "line 2 | 'prompt'"),
    ("throughput --dataset-name custom", "--dataset"),
    ("throughput --dataset-name mmlu", "data set"),
    ("throughput --dataset-name demo,gsm8k --random-prefix-len 5", "out --random-prefix-len"),
    ("latency --report OWN/away/x", "--report | there is no folder"),
    ("throughput --output-json /tmp", "--output-json | is a folder"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(arguments: str, words: str, tiny: str, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    command, *flags = arguments.replace("OWN", str(own)).split()
    result = bench(command, "--model", tiny, *flags)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert [part for part in words.split(" | ") if part not in line] == [], line


def test_random_prompts_may_begin_alike_and_ignore_ends_unless_told(llm: DiffusionLLM) -> None:
    data = Data(num_prompts=3, input_len=4, random_prefix_len=6)
    for params, ignores in ((SamplingParams(), True), (SamplingParams(ignore_eos=False), False)):
        prompts, wishes = tasks(llm, data, [("random", [])], params)["random"]
        assert [wish.ignore_eos for wish in wishes] == [ignores] * 3
        assert [len(prompt) for prompt in prompts] == [10] * 3
        assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
        assert len({tuple(prompt[6:]) for prompt in prompts}) == 3
