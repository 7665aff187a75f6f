"""The benchmarks count, time and print what they say; on toys, and once on the demo model."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from typer.testing import CliRunner, Result

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli import bench
from diffray.cluster.cli.bench import counted, percentile, sizes_of, timed
from diffray.cluster.cli.datasets import BUNDLED, Data, read_rows, tasks
from diffray.cluster.cli.main import app
from diffray.cluster.frontend.output import CompletionOutput, RequestOutput
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", "llada_moe")


@pytest.fixture(scope="module")
def llm(tiny: str) -> DiffusionLLM:
    return DiffusionLLM(tiny)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def measured(command: str, folder: Path, *arguments: str) -> Any:
    result = run(command, *arguments, "--output-json", str(folder / "o.json"))
    assert result.exit_code == 0, result.output
    return json.loads((folder / "o.json").read_text())["runs"], result.output


def test_percentiles_are_between_the_two_nearest_and_lists_are_checked() -> None:
    for numbers, share, found in (
        ([4, 1, 3, 2], 50, 2.5), ([1, 2, 3, 4, 5], 99, 4.96), ([7], 99, 7), ([1, 2], 100, 2),
        ([], 50, 0),
    ):  # fmt: skip
        assert percentile(numbers, share) == pytest.approx(found)
    assert sizes_of("1,8,64") == [1, 8, 64]
    for wrong in ("0", "65", "a", "1.5", "", "1,inf"):
        with pytest.raises(ValueError, match="--batch-size"):
            sizes_of(wrong)


def test_bundled_data_sets_are_read() -> None:
    assert [len(read_rows(name, None, None)) for name in BUNDLED] == [96, 100, 164, 256]
    assert len(read_rows("humaneval", None, 5)) == 5
    assert read_rows("gsm8k", None, 1)[0].prompt.startswith("Janet")
    tasks = {"arithmetic", "math", "code", "json", "rewriting", "outside"}
    assert {ask.task for ask in read_rows("demo", None, 99)} == tasks


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


class TestOffline:
    def test_latency(self, tiny: str, tmp_path: Path) -> None:
        flags = "--batch-size 1,3 --input-len 8 --output-len 12 --num-iters-warmup 1 --num-iters 2 "
        flags += "--decoder fixed --set decoder.steps=6 --block-length 12 --set canvas=fixed"
        (one, three), shown = measured("latency", tmp_path, "--model", tiny, *flags.split())
        assert (one["batch_size"], three["batch_size"]) == (1, 3)
        assert (one["tokens"], one["forwards"], one["tokens_per_forward"]) == (24, 12, 2)
        assert (three["tokens"], three["forwards"], three["tokens_per_forward"]) == (72, 12, 2)
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert "Avg latency: " in shown and "step ms" in shown and "batch 3" in shown

    @pytest.mark.parametrize(
        ("command", "requests"),
        [
            ("latency --batch-size 1,2 --num-iters 2 --num-iters-warmup 1", 3 * (2 + 1)),
            ("throughput --num-prompts 3 --max-num-seqs 2", 3 + 2),
            ("throughput --num-prompts 3 --max-num-seqs 1", 3 + 1),
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

        monkeypatch.setattr(bench, "tqdm", Shown)
        flags = "--input-len 4 --output-len 4 --model"
        assert run(*command.split(), *flags.split(), tiny).exit_code == 0
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
        runs = iter(range(9))

        def pressed(*arguments: Any) -> Any:
            if next(runs) == finished:
                raise KeyboardInterrupt
            return timed(*arguments)

        monkeypatch.setattr(bench, "timed", pressed)
        flags = "--batch-size 1,2 --num-iters 1 --num-iters-warmup 0 --input-len 8 --output-len 4"
        numbers = tmp_path / "o.json"
        result = run("latency", "--model", tiny, *flags.split(), "--output-json", str(numbers))
        assert result.exit_code == 130, result.output
        (line,) = result.stderr.splitlines()
        assert f"interrupted after {finished} of 2 runs" in line
        found = json.loads(numbers.read_text())
        facts = found["facts"]
        assert len(found["runs"]) == finished and facts["interrupted"] in line
        assert facts["block length"] == "32" and facts["prefix caching"] == "off"
        kinds = [json.loads(facts[part])["kind"] for part in ("decoder", "iteration", "cache")]
        assert kinds == ["threshold", "blockwise", "dual"]
        assert "prompts of 8 tokens, max_tokens 4" in facts["requests of a batch"]


# What is refused before the first run, and parts of the one sentence; OWN is a wrong file.
MISTAKES = [
    ("throughput --dataset-name demo,custom --dataset-path OWN", "line 2 | 'prompt'"),
    ("throughput --dataset-name custom", "--dataset"),
    ("throughput --dataset-name mmlu", "data set"),
    ("throughput --dataset-name demo,gsm8k --random-prefix-len 5", "out --random-prefix-len"),
    ("latency --output-json OWN/away/x", "--output-json | there is no folder"),
    ("throughput --output-json /tmp", "--output-json | is a folder"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(arguments: str, words: str, tiny: str, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    command, *flags = arguments.replace("OWN", str(own)).split()
    result = run(command, "--model", tiny, *flags)
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
