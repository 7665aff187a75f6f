"""The offline benchmarks check what was typed before they begin, and keep what they found."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench import offline, roofline
from diffray.cluster.cli.bench.datasets import Data, tasks
from diffray.cluster.cli.bench.offline import look_at
from diffray.cluster.cli.main import app
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.ARRAY, "cpu", 1 << 20)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def refused(*arguments: str) -> str:
    """Return the one sentence with which a command ends."""
    result = bench(*arguments)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", "llada")


class TestBeforeTheFirstRun:
    def test_all_data_sets_are_read(self, tiny: str, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        own.write_text("{}")
        flags = "--dataset-name", "demo,custom", "--dataset-path", str(own)
        assert "'prompt'" in refused("throughput", "--model", tiny, *flags)

    @pytest.mark.parametrize("names", ["demo", "random", "random,gsm8k"])
    def test_a_file_that_would_not_be_read_is_refused(self, tiny: str, names: str) -> None:
        flags = "--dataset-name", names, "--dataset-path", "own.jsonl"
        assert "leave out --dataset-path" in refused("throughput", "--model", tiny, *flags)

    def test_only_random_prompts_begin_alike(self, tiny: str) -> None:
        flags = "--dataset-name", "demo,gsm8k", "--random-prefix-len", "5"
        assert "leave out --random-prefix-len" in refused("throughput", "--model", tiny, *flags)

    @pytest.mark.parametrize("flag", ["--report", "--output-json"])
    @pytest.mark.parametrize("command", ["latency", "throughput"])
    def test_results_have_a_place(self, tmp_path: Path, command: str, flag: str) -> None:
        away = str(tmp_path / "away" / "x")
        assert f"{flag} {away}: there is no folder" in refused(command, flag, away)
        assert "is a folder" in refused(command, flag, str(tmp_path))


@pytest.mark.parametrize("typed", [True, False])
def test_random_prompts_ignore_ends_unless_told(tiny: str, typed: bool) -> None:
    with DiffusionLLM(tiny) as llm:
        params = SamplingParams(ignore_eos=False) if typed else SamplingParams()
        data = Data(num_prompts=1, input_len=2)
        work = tasks(llm, data, [("random", [])], params)
    assert [wish.ignore_eos for wish in work["random"][1]] == [not typed]


def test_random_prompts_may_begin_alike(tiny: str) -> None:
    with DiffusionLLM(tiny) as llm:
        data = Data(num_prompts=3, input_len=4, random_prefix_len=6)
        work = tasks(llm, data, [("random", [])], SamplingParams())
    prompts = work["random"][0]
    assert [len(prompt) for prompt in prompts] == [10] * 3
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 3


class TestOffline:
    def test_a_report_tells_what_was_not_typed(self, tiny: str, tmp_path: Path) -> None:
        page, numbers = tmp_path / "o.html", tmp_path / "o.json"
        result = bench(
            *("latency", "--model", tiny, "--batch-size", "1", "--num-iters", "1"),
            *("--num-iters-warmup", "0", "--input-len", "8", "--output-len", "4"),
            *("--report", str(page), "--output-json", str(numbers)),
        )
        assert result.exit_code == 0, result.output
        facts = json.loads(numbers.read_text())["facts"]
        assert facts["block length"] == "32"
        kinds = [json.loads(facts[part])["kind"] for part in ("decoder", "iteration", "cache")]
        assert kinds == ["threshold", "blockwise", "dual"]
        assert facts["requests of a batch"] == "1, prompts of 8 tokens, max_tokens 4"
        assert "prompts of 8 tokens, max_tokens 4" in page.read_text()

    @pytest.mark.parametrize("shared", [False, True])
    def test_prompts_come_again_and_are_run_again(self, tmp_path: Path, shared: bool) -> None:
        numbers = tmp_path / "o.json"
        result = bench(
            *("latency", "--model", "demo-llada2", "--batch-size", "1", "--num-iters", "2"),
            *("--num-iters-warmup", "0", "--input-len", "200", "--output-len", "4"),
            *("--output-json", str(numbers), *(["--enable-prefix-caching"] * shared)),
        )
        assert result.exit_code == 0, result.output
        found = json.loads(numbers.read_text())
        assert found["facts"]["prefix caching"] == ("on" if shared else "off")

    @pytest.mark.parametrize("finished", [0, 1])
    def test_an_interrupt_keeps_finished_batches(
        self, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int
    ) -> None:
        looks = iter(range(9))

        def pressed(*arguments: object) -> object:
            if next(looks) == finished:
                raise KeyboardInterrupt
            return look_at(*arguments)  # type: ignore[arg-type]  # handed on as they come

        monkeypatch.setattr(offline, "look_at", pressed)
        page, numbers = tmp_path / "o.html", tmp_path / "o.json"
        result = bench(
            *("latency", "--model", tiny, "--batch-size", "1,2", "--num-iters", "1"),
            *("--num-iters-warmup", "0", "--input-len", "8", "--output-len", "4"),
            *("--report", str(page), "--output-json", str(numbers)),
        )
        assert result.exit_code == 130, result.output
        (line,) = result.stderr.splitlines()
        if finished:
            assert line.startswith("diffray: interrupted after 1 of 2 runs")
            assert len(json.loads(numbers.read_text())["runs"]) == 1
            assert "after 1 of 2 runs" in page.read_text()
        else:
            assert line.endswith("before any run finished; there are no results")
            assert not page.exists() and not numbers.exists()
