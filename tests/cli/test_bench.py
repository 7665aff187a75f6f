"""The benchmarks count, time and print what they say; on toys, and once on the demo model."""

import asyncio
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner, Result

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.api.service import Service
from diffray.cluster.cli.bench import roofline
from diffray.cluster.cli.bench.arrivals import RampUp, arrivals
from diffray.cluster.cli.bench.charts import ticks
from diffray.cluster.cli.bench.commands import app
from diffray.cluster.cli.bench.counters import Counters, RankSeconds, between, parse
from diffray.cluster.cli.bench.offline import counted, timed
from diffray.cluster.cli.bench.percentiles import Spread, as_word, counts, percentile
from diffray.cluster.cli.bench.phases import CACHE, DECODE, HOST, MODEL, Phases
from diffray.cluster.cli.bench.prompts import BOXED, read_asks
from diffray.cluster.cli.bench.roofline import Reads, memory_bandwidth
from diffray.cluster.cli.bench.serving_result import peak_concurrency, peak_tokens
from diffray.cluster.cli.bench.streamed import Reply
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import load_local
from diffray.components.denoiser import Denoiser
from diffray.components.experts import Experts
from diffray.components.mesh import Mesh
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.messages import Request
from diffray.workers.output import CompletionOutput, RequestOutput
from tests.helpers.api_server import serve
from tests.helpers.fake_endpoint import Answer, Asked, FakeEndpoint, fake_endpoint
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.toy import ToyModel, drain, prompt_of, toy_engine

VLLMS_KEYS = set(
    """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness
    max_concurrency duration completed failed total_input_tokens total_output_tokens
    request_throughput request_goodput output_throughput total_token_throughput latencies
    mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms
    p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms""".split()
)
DETAILS = set("input_lens output_lens ttfts itls start_times generated_texts errors".split())
DIFFUSION = {
    f"diffusion_{name}"
    for name in "committed_throughput steps_per_canvas committed_per_step committed_tokens "
    "denoising_steps canvas_positions".split()
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", "llada_moe")


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.ARRAY, "cpu", 1 << 20)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def page(path: Path) -> ElementTree.Element:
    """Return a report, which must be well-formed and need nothing from elsewhere."""
    text = path.read_text()
    for foreign in ("<script", "<link", "<img", "@import", "url(", "src="):
        assert foreign not in text
    assert "nan" not in text and "inf," not in text
    return ElementTree.fromstring(text.partition("\n")[2])


def headings(root: ElementTree.Element) -> list[str]:
    return [heading.text or "" for heading in root.iter("h2")]


class TestPercentiles:
    def test_between_the_two_nearest(self) -> None:
        assert percentile([4, 1, 3, 2], 50) == 2.5
        assert percentile([1, 2, 3, 4, 5], 99) == pytest.approx(4.96)
        assert percentile([7], 99) == 7
        assert percentile([1, 2], 100) == 2
        assert percentile([], 50) == 0

    def test_deviation_is_the_populations(self) -> None:
        spread = Spread.of([2, 4, 4, 4, 5, 5, 7, 9], [25])
        assert (spread.mean, spread.std, spread.percentiles) == (5, 2, ((25, 4.0),))

    def test_names(self) -> None:
        assert [as_word(99.0), as_word(99.9)] == ["99", "99.9"]

    def test_lists_are_checked(self) -> None:
        assert counts("1,8,64", "--batch-size", high=64) == [1, 8, 64]
        for wrong in ("0", "65", "a", "1.5", ""):
            with pytest.raises(ValueError, match="--batch-size"):
                counts(wrong, "--batch-size", high=64)


class TestArrivals:
    def test_same_seed_same_times(self) -> None:
        assert arrivals(20, 5.0, seed=3) == arrivals(20, 5.0, seed=3) != arrivals(20, 5.0, seed=4)

    def test_last_request_comes_when_the_rate_says(self) -> None:
        for burstiness in (0.2, 1.0, 5.0, math.inf):
            times = arrivals(100, 5.0, burstiness=burstiness)
            assert times == sorted(times)
            assert times[-1] == pytest.approx(20)

    def test_burstiness_is_the_gammas_shape(self) -> None:
        """The square of the gaps' variation is one over the shape."""
        for shape in (0.5, 1.0, 4.0):
            times = [0.0, *arrivals(20_000, 1.0, burstiness=shape, seed=1)]
            gaps = [later - earlier for earlier, later in pairwise(times)]
            spread = Spread.of(gaps, ())
            assert (spread.std / spread.mean) ** 2 == pytest.approx(1 / shape, rel=0.1)

    def test_without_a_rate_all_come_at_once(self) -> None:
        assert arrivals(3, math.inf) == [0, 0, 0]

    def test_ramp_up_ends_faster_than_it_begins(self) -> None:
        for strategy in ("linear", "exponential"):
            times = arrivals(100, 1, burstiness=math.inf, ramp=RampUp(strategy, 1, 10))
            assert times[1] - times[0] > 0.8
            assert times[-1] - times[-2] == pytest.approx(0.1, rel=0.05)
        with pytest.raises(ValueError, match="--ramp-up-strategy"):
            RampUp("steep", 1, 2)


class TestPrompts:
    def test_boxed_data_sets_are_there(self) -> None:
        assert [len(read_asks(name, None, 1000)) for name in BOXED] == [96, 164, 256]
        assert len(read_asks("humaneval", None, 5)) == 5
        assert read_asks("gsm8k", None, 1)[0].prompt.startswith("Janet")
        assert {ask.task for ask in read_asks("demo", None, 99)} == {"math", "code", "json"}

    def test_own_files(self, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        own.write_text('{"prompt": "a", "max_tokens": 7, "task": "x"}\n\n{"prompt": "b"}\n')
        first, second = read_asks("custom", own, 10)
        assert (first.task, first.max_tokens, second.task) == ("x", 7, "custom")
        share = tmp_path / "share.json"
        said = [{"value": "hi"}, {"value": "ho"}]
        share.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
        assert [ask.prompt for ask in read_asks("sharegpt", share, 10)] == ["hi"]

    def test_mistakes_say_where(self, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        own.write_text('{"prompt": "a"}\n{"text": "b"}\n')
        with pytest.raises(ValueError, match="line 2"):
            read_asks("custom", own, 10)
        for name, path in (("custom", None), ("gsm8k", own), ("mmlu", None)):
            with pytest.raises(ValueError, match=r"--dataset|data set"):
                read_asks(name, path, 10)


class TestPhases:
    def test_phases_add_up_and_tokens_stay(self) -> None:
        requests = [Request(n, prompt_of(9, n), SamplingParams(max_tokens=40)) for n in range(2)]
        plain, watched = toy_engine(ToyModel()), toy_engine(ToyModel())
        for request in requests:
            plain.add(request)
            watched.add(request)
        expected = drain(plain)
        methods = BatchPlan.denoise, BatchPlan.outcomes
        with Phases(watched) as phases:
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
        with Phases(engine) as phases:
            engine.model.embed(torch.tensor([1]))
        assert (phases.seconds[MODEL], phases.seconds[HOST]) == (1, 2)

    def test_ranks_show_what_they_say_to_each_other(self) -> None:
        engine = toy_engine(ToyModel())
        engine.mesh = Mesh(0, 2)
        assert "communication" in Phases(engine).seconds


@pytest.mark.gpu
def test_phases_of_a_device_add_up(tiny: str) -> None:
    with DiffusionLLM(tiny, device="cuda") as llm:
        params = SamplingParams(max_tokens=64, ignore_eos=True, seed=0)
        llm.generate([[1, 2, 3]], params)
        with Phases(llm.engine) as phases:
            run = timed(llm, "", [[[1, 2, 3]]], [[params]])
    assert sum(phases.seconds.values()) == pytest.approx(run.seconds, rel=0.1)


class TestReads:
    def test_bytes_of_a_step(self, tiny: str) -> None:
        """Bounds: all experts or one; keys of nothing, as `none` runs every position itself."""
        with DiffusionLLM(tiny, dtype="float32") as llm:
            model = llm.engine.model
            assert isinstance(model, Denoiser)
            whole = 4 * sum(p.numel() for p in model.parameters())
            table = 4 * model.embedding.weight_VH.numel()
            experts = [m for m in model.modules() if isinstance(m, Experts)]
            routed = 4 * sum(p.numel() for m in experts for p in m.parameters())
            forward = Experts.forward

            def look(cache: str) -> Reads:
                params = SamplingParams(max_tokens=32, ignore_eos=True, seed=0)
                params = params.model_copy(
                    update={"diffusion": SamplingParams(diffusion={"cache": {"kind": cache}})
                            .diffusion}
                )  # fmt: skip
                with Reads(llm.engine) as reads:
                    llm.generate([list(range(1, 9))], params, use_tqdm=False)
                return reads

            none, dual = look("none"), look("dual")
            assert none.keys == 0 < dual.keys
            least, most = whole - table - routed, whole - table
            assert least < none.weights / none.forwards <= most
            spec = model.spec
            position = 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
            # Its first step runs all 40 positions, the others the 32 of the block.
            assert dual.keys == (dual.forwards - 1) * 8 * position
            assert Experts.forward is forward

    def test_bandwidth_is_measured(self) -> None:
        assert memory_bandwidth(torch.device("cpu")) > 1e8


class TestCounting:
    def test_tokens_before_the_first_end(self) -> None:
        ids = [5, 6, 9, 7, 9]
        output = RequestOutput(None, [1], [CompletionOutput(0, token_ids=ids)])
        assert counted(output, [9], ignore_eos=False) == 2
        assert counted(output, [9], ignore_eos=True) == 5
        assert counted(output, [8], ignore_eos=False) == 5

    def test_a_run_counts_shared_forwards_once(self, tiny: str) -> None:
        params = SamplingParams(
            max_tokens=16, ignore_eos=True, diffusion={"decoder": {"kind": "fixed", "steps": 16}}
        )
        with DiffusionLLM(tiny) as llm:
            together = timed(llm, "", [[[1, 2], [3, 4]]], [[params] * 2])
            alone = timed(llm, "", [[[1, 2]], [[3, 4]]], [[params]] * 2)
        assert (together.tokens, together.forwards) == (32, 16)
        assert (alone.tokens, alone.forwards) == (32, 32)
        assert together.tokens_per_forward == alone.tokens_per_forward == 1
        assert together.sequence_rate is None and alone.sequence_rate
        assert alone.seconds == pytest.approx(sum(alone.latencies))


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
        rank = RankSeconds(0, 0)
        a = between(Counters(0, 0, 0, False, rank), ours, 2.0)
        b = between(Counters(0, 0, 0, True, rank), theirs, 2.0)
        assert a is not None and b is not None
        assert (b.denoising_steps, b.steps_per_canvas, b.committed_per_step) == (40, 20, 1.6)
        assert (a.denoising_steps, a.canvas, a.steps_per_canvas) == (40, 32, 20)
        assert (a.committed_per_step, a.committed_throughput) == (1.6, 32)

    def test_a_server_without_them(self) -> None:
        assert parse("vllm:num_requests_running 1.0\n") is None
        assert between(None, None, 1.0) is None


def reply(start: float, latency: float, pieces: list[tuple[float, int]], tokens: int) -> Reply:
    return Reply(start, start, latency, pieces, output_tokens=tokens)


class TestServingNumbers:
    def test_one_reply(self) -> None:
        one = Reply(8.0, 10.0, 2.0, [(10.5, 4), (11.5, 4), (12.0, 2)], output_tokens=16)
        assert (one.queued, one.ttft, one.itl, one.tpot) == (2.0, 0.5, [1.0, 0.5], 0.1)

    def test_peaks(self) -> None:
        """Ten tokens in chunks of 4, 4 and 2 characters; the end of one is the start of another."""
        one = reply(0.0, 2.0, [(0.5, 4), (1.5, 4), (2.0, 2)], 10)
        two = reply(2.0, 1.0, [(2.5, 1)], 3)
        assert peak_tokens([one, two]) == 5
        assert peak_concurrency([one, two]) == 1
        assert peak_concurrency([one, two, reply(1.9, 1.0, [], 0)]) == 2


def stream(asked: Asked) -> Answer:
    """Six tokens in two chunks, for three prompt tokens."""
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "fake"}]})
    if asked.path == "/tokenize":
        return Answer(body={"tokens": list(range(len(asked.body["prompt"].split())))})
    if asked.path == "/detokenize":
        return Answer(body={"prompt": " ".join(map(str, asked.body["tokens"]))})
    if not asked.path.startswith("/v1/"):
        return Answer(404, {"error": {"message": "no such path"}})
    if asked.body.get("seed") == 13:
        return Answer(400, {"error": {"message": "thirteen"}})

    def chunks() -> Iterator[dict[str, object] | str]:
        chat = "messages" in asked.body
        if chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        for text in ("a b c ", "d e f"):
            yield {"choices": [{"delta": {"content": text}} if chat else {"text": text}]}
        yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}
        yield "[DONE]"

    return Answer(chunks=chunks())


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with fake_endpoint(stream) as endpoint:
        yield endpoint


class TestServe:
    def test_block_and_keys_are_vllms(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        result = bench(
            *("serve", "--base-url", fake.url, "--num-prompts", "4", "--input-len", "5"),
            *("--goodput", "ttft:9000", "e2el:9000", "--save-result", "--save-detailed"),
            *("--result-dir", str(tmp_path), "--result-filename", "r.json", "--metadata", "a=b"),
            *("c=d", "--max-concurrency", "2", "--temperature", "0", "--extra-body", '{"x": 1}'),
        )
        assert result.exit_code == 0, result.output
        assert "============ Serving Benchmark Result ============\n" in result.output
        for line in (
            "Successful requests:                     4         ",
            "Failed requests:                         0         ",
            "Maximum request concurrency:             2         ",
            "Total input tokens:                      12        ",
            "Total generated tokens:                  24        ",
            "---------------Time to First Token----------------",
            "-----Time per Output Token (excl. 1st token)------",
        ):
            assert line + "\n" in result.output
        assert "tell nothing of diffusion" in result.output
        found = json.loads((tmp_path / "r.json").read_text())
        assert set(found) >= VLLMS_KEYS | DETAILS
        assert not DIFFUSION & set(found)
        assert (found["a"], found["c"], found["request_rate"]) == ("b", "d", "inf")
        assert found["request_goodput"] == found["request_throughput"] > 0
        assert found["output_lens"] == [6] * 4
        assert [len(gaps) for gaps in found["itls"]] == [1] * 4
        bodies = [asked.body for asked in fake.asked if asked.path == "/v1/completions"]
        assert len(bodies) == 4
        for body in bodies:
            assert len(body["prompt"]) == 5
            assert (body["x"], body["temperature"], body["ignore_eos"]) == (1, 0, True)
        ids = [a.headers["x-request-id"] for a in fake.asked if a.path == "/v1/completions"]
        assert len(set(ids)) == 4

    def test_sweep_over_chats(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        result = bench(
            *("serve", "--base-url", fake.url + "/v1", "--backend", "openai-chat", "--model", "m"),
            *("--dataset-name", "gsm8k", "--num-prompts", "3", "--max-concurrency", "1,2"),
            *("--request-rate", "100,inf", "--save-result", "--result-dir", str(tmp_path)),
            *("--report", str(tmp_path / "out.html"), "--percentile-metrics", "ttft,e2el"),
        )
        assert result.exit_code == 0, result.output
        assert result.output.count("Serving Benchmark Result") == 4
        files = sorted(tmp_path.glob("*.json"))
        assert len(files) == 4
        kept = json.loads(files[0].read_text())
        assert not DETAILS & set(kept)
        assert "p99_e2el_ms" in kept and "p99_itl_ms" not in kept
        chats = [asked for asked in fake.asked if asked.path == "/v1/chat/completions"]
        assert len(chats) == 12
        assert chats[0].body["messages"][0]["role"] == "user"
        root = page(tmp_path / "out.html")
        assert {"Runs", "Throughput and latency", "gsm8k, run 4"} <= set(headings(root))
        circles = [e for e in root.iter() if e.tag.endswith("circle")]
        assert len(circles) == 4

    @pytest.mark.parametrize(
        ("flags", "path"),
        [
            (("--dataset-name", "demo"), "/v1/chat/completions"),
            (("--dataset-name", "random,demo", "--input-len", "3"), "/v1/chat/completions"),
            (("--input-len", "3"), "/v1/completions"),
            (("--dataset-name", "demo", "--backend", "openai"), "/v1/completions"),
            (("--dataset-name", "demo", "--endpoint", "/v1/completions"), "/v1/completions"),
            (("--input-len", "3", "--endpoint", "/v1/chat/completions"), "/v1/chat/completions"),
        ],
    )
    def test_questions_are_asked_as_chats(
        self, fake: FakeEndpoint, flags: tuple[str, ...], path: str
    ) -> None:
        """Unless something else was typed; with several data sets, all go the same way."""
        result = bench("serve", "--base-url", fake.url, "--num-prompts", "1", *flags)
        assert result.exit_code == 0, result.output
        asked = [a for a in fake.asked if a.path.endswith("/completions")]
        assert {a.path for a in asked} == {path}
        assert {"messages" in a.body for a in asked} == {"chat" in path}

    def test_failures_are_counted_and_told(self, fake: FakeEndpoint) -> None:
        result = bench(
            *("serve", "--base-url", fake.url, "--num-prompts", "2", "--input-len", "2"),
            *("--set", "seed=13", "--disable-tqdm"),
        )
        assert result.exit_code == 1
        assert "Failed requests:                         2 " in result.output
        assert "failed: 2 x the server answers 400: thirteen" in result.output
        assert result.stderr.splitlines()[-1] == (
            "diffray: no request succeeded; the first failed so: the server answers 400: thirteen"
        )

    def test_ready_check_waits_for_an_answer(self, fake: FakeEndpoint) -> None:
        common = ("serve", "--base-url", fake.url, "--num-prompts", "1", "--input-len", "2")
        assert bench(*common, "--ready-check-timeout-sec", "5").exit_code == 0
        refused = bench(*common, "--ready-check-timeout-sec", "0.1", "--set", "seed=13")
        assert refused.exit_code == 1
        assert "not ready in 0.1 s: the server answers 400: thirteen" in refused.stderr

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (("--backend", "tgi"), "--backend"),
            (("--goodput", "speed:3"), "--goodput"),
            (("--max-concurrency", "0"), "--max-concurrency"),
            (("--request-rate", "0"), "--request-rate"),
            (("--percentile-metrics", "ttft,foo"), "foo"),
            (("--extra-body", "[]"), "--extra-body"),
            (("--result-dir", "x"), "--save-result"),
            (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
            (
                ("--max-concurrency", "1,2", "--save-result", "--result-filename", "x"),
                "--append-result",
            ),
        ],
    )
    def test_mistakes_are_one_sentence(self, flags: tuple[str, ...], says: str) -> None:
        result = bench("serve", "--base-url", "http://127.0.0.1:9", *flags)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith("diffray: ") and says in line

    def test_nobody_there(self) -> None:
        result = bench("serve", "--base-url", "http://127.0.0.1:9")
        assert result.exit_code == 1
        assert "nothing answers" in result.stderr


class TestOffline:
    def test_latency(self, tiny: str, tmp_path: Path) -> None:
        result = bench(
            *("latency", "--model", tiny, "--batch-size", "1,3", "--input-len", "8"),
            *("--output-len", "12", "--num-iters-warmup", "1", "--num-iters", "2"),
            *("--decoder", "fixed", "--set", "decoder.steps=6", "--block-length", "12"),
            *("--output-json", str(tmp_path / "o.json"), "--report", str(tmp_path / "o.html")),
        )
        assert result.exit_code == 0, result.output
        assert "Avg latency: " in result.output and "99% percentile latency: " in result.output
        one, three = json.loads((tmp_path / "o.json").read_text())["runs"]
        assert (one["batch_size"], three["batch_size"]) == (1, 3)
        assert (one["tokens"], one["forwards"], one["tokens_per_forward"]) == (24, 12, 2)
        assert (three["tokens"], three["forwards"], three["tokens_per_forward"]) == (72, 12, 2)
        assert sum(one["split_share"].values()) == pytest.approx(1)
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert one["roofline_share"] > 0
        assert {"Numbers", "Time split"} <= set(headings(page(tmp_path / "o.html")))

    def test_throughput_by_task(self, tiny: str, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        lines = [
            {"prompt": "abc", "task": t, "max_tokens": n}
            for t, n in zip("xyx", (4, 5, 6), strict=True)
        ]
        own.write_text("\n".join(json.dumps(line) for line in lines))
        result = bench(
            *("throughput", "--model", tiny, "--dataset-name", "custom,random"),
            *("--dataset-path", str(own), "--num-prompts", "3", "--input-len", "4"),
            *("--ignore-eos", "--max-num-seqs", "1", "--set", "max_tokens=9"),
            *("--output-json", str(tmp_path / "o.json"), "--report", str(tmp_path / "o.html")),
        )
        assert result.exit_code == 0, result.output
        runs = json.loads((tmp_path / "o.json").read_text())["runs"]
        assert [(run["name"], run["requests"], run["tokens"]) for run in runs] == [
            ("x", 2, 18), ("y", 1, 9), ("random", 3, 27)
        ]  # fmt: skip
        assert all(run["sequence_rate"] > 0 for run in runs)
        assert "Tokens per forward by task" in headings(page(tmp_path / "o.html"))

    def test_the_files_lengths_hold_where_none_is_typed(self, tiny: str, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        own.write_text('{"prompt": "abc", "max_tokens": 5}')
        result = bench(
            *("throughput", "--model", tiny, "--dataset-name", "custom", "--dataset-path"),
            *(str(own), "--ignore-eos", "--output-json", str(tmp_path / "o.json")),
        )
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / "o.json").read_text())["runs"][0]["tokens"] == 5


def test_axes_are_round_and_cover() -> None:
    assert ticks(9.7) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.03)[-1] >= 0.03
    assert ticks(0) == [0, 1]


@pytest.mark.slow
def test_a_real_server(tmp_path: Path) -> None:
    """The demo model behind HTTP: the server's counters agree with what its streams carried."""
    engine, tokenizer = load_local("demo", EngineConfig(max_num_seqs=4, dtype="float32"))
    with engine, serve(Service(engine, tokenizer, ("demo",))) as url:
        result = bench(
            *("serve", "--base-url", url, "--backend", "openai-chat", "--dataset-name"),
            *("demo,random", "--num-prompts", "6", "--input-len", "16", "--output-len", "64"),
            *("--max-concurrency", "4", "--num-warmups", "1", "--save-result", "--append-result"),
            *("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.jsonl"),
            *("--report", str(tmp_path / "out.html"), "--decoder", "threshold"),
        )
    assert result.exit_code == 0, result.output
    assert result.output.count("Diffusion Decoding") == 2
    demo, chance = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    for found in (demo, chance):
        assert set(found) >= VLLMS_KEYS | DETAILS | DIFFUSION
        assert (found["completed"], found["failed"]) == (6, 0)
        assert found["diffusion_committed_tokens"] == found["total_output_tokens"]
        assert found["diffusion_committed_per_step"] >= 1
    assert chance["output_lens"] == [64] * 6
    assert demo["diffusion_committed_per_step"] > 2
    assert "Tokens per forward by task" in headings(page(tmp_path / "out.html"))


def test_replies_of_a_broken_stream_fail() -> None:
    def cut(asked: Asked) -> Answer:
        return Answer(chunks=iter([{"choices": [{"text": "a"}]}]))

    async def one(url: str) -> Reply:
        import httpx2

        from diffray.cluster.cli.bench.streamed import ask

        async with httpx2.AsyncClient(base_url=url) as client:
            return await ask(client, "/v1/completions", {}, arrival=0.0, headers={})

    with fake_endpoint(cut) as endpoint:
        assert asyncio.run(one(endpoint.url)).error == "the stream broke off"
