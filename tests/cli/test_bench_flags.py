"""The benchmarks check what was typed before they begin, and keep what they found."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli.bench import offline_runs, roofline
from diffray.cluster.cli.bench.commands import app
from diffray.cluster.cli.bench.flags import Data
from diffray.cluster.cli.bench.offline import look_at
from diffray.cluster.cli.bench.phases import MEANINGS
from diffray.cluster.cli.bench.workload import tasks
from tests.helpers.fake_endpoint import Answer, Asked, FakeEndpoint, fake_endpoint
from tests.helpers.paths import ROOT
from tests.helpers.tiny import tiny_checkpoint

SENT = "/v1/completions"
COMPLETIONS = "serve", "--backend", "openai"


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.ARRAY, "cpu", 1 << 20)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """Return the one sentence with which a command ends."""
    result = bench(*arguments)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def stream(asked: Asked) -> Answer:
    """Two tokens for three; a prompt `no` is refused, and at `stop` somebody presses Ctrl-C."""
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "fake"}]})
    if asked.path == "/tokenize":
        return Answer(body={"tokens": list(range(len(asked.body["prompt"].split())))})
    if asked.path != SENT:
        return Answer(404, {"error": {"message": "no such path"}})
    if asked.body["prompt"] == "no":
        return Answer(400, {"error": {"message": "not that one"}})
    stops = asked.body["prompt"] == "stop"
    if stops:
        os.kill(os.getpid(), signal.SIGINT)

    def chunks() -> Iterator[dict[str, object] | str]:
        for _ in range(1000 * stops):  # until the client hangs up
            yield {"choices": []}
            time.sleep(0.01)
        yield {"choices": [{"text": "a b"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        yield "[DONE]"

    return Answer(chunks=chunks())


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with fake_endpoint(stream) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench") / "model", "llada")


def custom(path: Path, *prompts: str, **others: object) -> tuple[str, ...]:
    """Return the flags that ask what was written into a file of one's own."""
    path.write_text("\n".join(json.dumps({"prompt": prompt, **others}) for prompt in prompts))
    return "--dataset-name", "custom", "--dataset-path", str(path)


def sent(fake: FakeEndpoint) -> list[dict[str, Any]]:
    return [asked.body for asked in fake.asked if asked.path == SENT]


class TestBeforeTheFirstRequest:
    def test_all_data_sets_are_read(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        own.write_text("{}")
        names = "demo,custom", "--dataset-path", str(own)
        assert "'prompt'" in refused("serve", "--base-url", fake.url, "--dataset-name", *names)
        assert not fake.asked

    def test_a_file_that_nobody_reads_is_refused(self, fake: FakeEndpoint, tiny: str) -> None:
        for names in ("demo", "random", "random,gsm8k"):
            flags = "--dataset-name", names, "--dataset-path", "own.jsonl"
            for command in (("serve", "--base-url", fake.url), ("throughput", "--model", tiny)):
                assert "leave out --dataset-path" in refused(*command, *flags)
        assert not fake.asked

    def test_only_random_prompts_begin_alike(self, fake: FakeEndpoint, tiny: str) -> None:
        flags = "--dataset-name", "demo,gsm8k", "--random-prefix-len", "5"
        for command in (("serve", "--base-url", fake.url), ("throughput", "--model", tiny)):
            assert "leave out --random-prefix-len" in refused(*command, *flags)
        assert not fake.asked

    def test_results_have_a_place(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        away = str(tmp_path / "away" / "x")
        serve = "serve", "--base-url", fake.url
        assert "make it first" in refused(*serve, "--report", away)
        assert "is a folder" in refused(*serve, "--report", str(tmp_path))
        keep = "--save-result", "--result-dir", str(tmp_path), "--result-filename", "away/x"
        assert "make it first" in refused(*serve, *keep)
        for command in ("latency", "throughput"):
            for flag in ("--report", "--output-json"):
                assert f"{flag} {away}: there is no folder" in refused(command, flag, away)
        assert not fake.asked

    @pytest.mark.parametrize(
        ("flags", "name"),
        [
            (("--set", "max_tokens=7", "--output-len", "64"), "max_tokens"),
            (("--extra-body", '{"max_tokens": 7}', "--output-len", "64"), "max_tokens"),
            (("--set", "model=a", "--model", "b"), "model"),
            (("--extra-body", '{"top_p": 0.5}', "--top-p", "0.5"), "top_p"),
            (
                ("--decoder", "fixed", "--extra-body", '{"diffusion": {"decoder": {"kind": "x"}}}'),
                "diffusion.decoder.kind",
            ),
        ],
    )
    def test_what_is_said_twice(
        self, fake: FakeEndpoint, flags: tuple[str, ...], name: str
    ) -> None:
        assert f"{name} is given twice" in refused("serve", "--base-url", fake.url, *flags)
        assert not fake.asked


def test_an_extra_body_goes_beside_what_was_typed(fake: FakeEndpoint) -> None:
    extra = {"diffusion": {"decoder": {"steps": 4}, "block_length": 8}, "a.b": 1}
    result = bench(
        *("serve", "--base-url", fake.url, "--num-prompts", "1", "--input-len", "2"),
        *("--decoder", "fixed", "--extra-body", json.dumps(extra)),
    )
    assert result.exit_code == 0, result.output
    (body,) = sent(fake)
    assert body["diffusion"] == {"decoder": {"kind": "fixed", "steps": 4}, "block_length": 8}
    assert body["a.b"] == 1


@pytest.mark.parametrize("typed", [True, False])
def test_random_prompts_ignore_ends_unless_told(fake: FakeEndpoint, tiny: str, typed: bool) -> None:
    flags = "--num-prompts", "1", "--input-len", "2", *(("--set", "ignore_eos=false") * typed)
    assert bench("serve", "--base-url", fake.url, *flags).exit_code == 0
    assert [body["ignore_eos"] for body in sent(fake)] == [not typed]
    with DiffusionLLM(tiny) as llm:
        params = SamplingParams(ignore_eos=False) if typed else SamplingParams()
        data = Data(num_prompts=1, input_len=2)
        work = tasks(llm, [("random", [])], data, seed=0, raw=True, params=params)
    assert [wish.ignore_eos for wish in work["random"][1]] == [not typed]


def test_random_prompts_may_begin_alike(fake: FakeEndpoint, tiny: str) -> None:
    flags = "--num-prompts", "3", "--input-len", "4", "--random-prefix-len", "6"
    assert bench("serve", "--base-url", fake.url, *flags).exit_code == 0
    # The fake's ids are numbers counted from 0.
    assert [body["prompt"] for body in sent(fake)] == [[*range(6), *range(4)]] * 3
    with DiffusionLLM(tiny) as llm:
        data = Data(num_prompts=3, input_len=4, random_prefix_len=6)
        work = tasks(llm, [("random", [])], data, seed=0, raw=True, params=SamplingParams())
    prompts = work["random"][0]
    assert [len(prompt) for prompt in prompts] == [10] * 3
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 3


def test_every_run_of_a_sweep_has_random_prompts_of_its_own(fake: FakeEndpoint, tiny: str) -> None:
    """But the same number again has the same; the first of all, which warms up, has its own."""
    flags = (
        "--num-prompts",
        "2",
        "--input-len",
        "5",
        "--random-prefix-len",
        "3",
        "--num-warmups",
        "1",
    )
    for _ in range(2):
        sweep = "--max-concurrency", "1,2", "--tokenizer", tiny
        assert bench("serve", "--base-url", fake.url, *flags, *sweep).exit_code == 0
    prompts = [tuple(body["prompt"]) for body in sent(fake)]
    assert {len(prompt) for prompt in prompts} == {8} and len({p[:3] for p in prompts}) == 1
    assert len(set(prompts)) == 1 + 2 * 2
    half = len(prompts) // 2
    assert sorted(prompts[:half]) == sorted(prompts[half:])


class TestServed:
    def test_a_report_tells_of_failures(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        """Of all: then nothing is said of the server's metrics, which had nothing to tell."""
        page = tmp_path / "out.html"
        serve = *COMPLETIONS, "--base-url", fake.url, "--report", str(page)
        last = refused(*serve, "--disable-tqdm", *custom(tmp_path / "a", "no", "no"))
        assert last == (
            "diffray: no request succeeded; the first failed so: "
            "the server answers 400: not that one"
        )
        told = page.read_text()
        assert "Run 1: 2 of 2 failed, the first: the server answers 400: not that one" in told
        assert "/metrics" not in told
        result = bench(*serve, *custom(tmp_path / "b", "yes", "no"))
        assert result.exit_code == 0, result.output
        assert "Run 1: 1 of 2 failed" in page.read_text()
        assert "/metrics tell nothing" in page.read_text()

    def test_tasks_and_what_was_asked_are_kept(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        page = tmp_path / "out.html"
        result = bench(
            *(*COMPLETIONS, "--base-url", fake.url, "--report", str(page), "--save-detailed"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
            *custom(tmp_path / "own", "yes", "yes", task="mine", max_tokens=9),
        )
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / "r.json").read_text())["tasks"] == ["mine", "mine"]
        assert "<td>model</td><td>fake</td>" in page.read_text()
        assert "2, prompts of 3 tokens, max_tokens 9<" in page.read_text()

    def test_an_interrupt_keeps_finished_runs(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        page = tmp_path / "out.html"
        result = bench(
            *(*COMPLETIONS, "--base-url", fake.url, "--report", str(page), "--save-result"),
            *("--result-dir", str(tmp_path), "--max-concurrency", "1", "--dataset-name"),
            *("random,custom", "--input-len", "3", "--num-prompts", "2", "--dataset-path"),
            custom(tmp_path / "own", "stop", "yes")[-1],
        )
        assert result.exit_code == 130, result.output
        assert result.stderr.splitlines()[-1].startswith("diffray: interrupted after 1 of 2 runs")
        assert "<td>after 1 of 2 runs</td>" in page.read_text()
        (kept,) = tmp_path.glob("*.json")
        assert json.loads(kept.read_text())["completed"] == 2

    def test_an_interrupt_keeps_answered_requests(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        own = custom(tmp_path / "own", "yes", "no", "stop", "yes", max_tokens=9, task="mine")
        result = bench(
            *(*COMPLETIONS, "--base-url", fake.url, "--save-result", "--save-detailed"),
            *("--result-dir", str(tmp_path), "--result-filename", "r.json"),
            *("--report", str(tmp_path / "out.html"), "--max-concurrency", "1", *own),
        )
        assert result.exit_code == 130, result.output
        assert result.stderr.splitlines()[-1] == (
            "diffray: interrupted after 0 of 1 runs; results are those of what had finished"
        )
        found = json.loads((tmp_path / "r.json").read_text())
        assert (found["completed"], found["failed"], found["num_prompts"]) == (1, 1, 2)
        assert found["interrupted"] and found["tasks"] == ["mine"] * 2
        assert "answered by then" in result.output
        assert "<td>after 0 of 1 runs</td>" in (tmp_path / "out.html").read_text()


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

        monkeypatch.setattr(offline_runs, "look_at", pressed)
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
            assert "<td>after 1 of 2 runs</td>" in page.read_text()
        else:
            assert line.endswith("before anything had finished; there are no results")
            assert not page.exists() and not numbers.exists()


def test_the_docs_say_the_phases_as_reports_do() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for phase, meaning in MEANINGS.items():
        assert f"| {phase} | {meaning} |\n" in text
