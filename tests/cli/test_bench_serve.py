"""`diffray bench serve`: what it has guidellm do, and what it makes of the answer."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diffray.cluster.api.service import Service
from diffray.cluster.cli.bench import guidellm, online
from diffray.cluster.cli.main import app
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import load_local
from tests.helpers import stand_in_guidellm
from tests.helpers.api_server import serve as serve_api
from tests.helpers.fake_endpoint import Answer, Asked, FakeEndpoint, fake_endpoint

INSTALLED = importlib.util.find_spec("guidellm") is not None
VLLMS_KEYS = set(
    """model_id request_rate max_concurrency duration completed failed total_input_tokens
    total_output_tokens request_throughput request_goodput output_throughput
    total_token_throughput mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
    median_tpot_ms std_tpot_ms p99_tpot_ms mean_e2el_ms median_e2el_ms p99_e2el_ms""".split()
)


def bench(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", "--base-url", url, *arguments])


def refused(url: str, *arguments: str) -> str:
    result = bench(url, *arguments)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def custom(path: Path, *prompts: str, **others: object) -> tuple[str, ...]:
    path.write_text("\n".join(json.dumps({"prompt": prompt, **others}) for prompt in prompts))
    return "--dataset-name", "custom", "--dataset-path", str(path)


def answer(asked: Asked) -> Answer:
    """Six tokens for three; a prompt `no` is refused."""
    if asked.path == "/v1/models":
        return Answer(body={"data": [{"id": "fake", "max_model_len": 100}]})
    if not asked.path.startswith("/v1/"):
        return Answer(404, {"error": {"message": "no such path"}})
    if asked.body.get("messages", [{}])[0].get("content") == "no":
        return Answer(400, {"error": {"message": "not that one"}})
    return Answer(body={"usage": {"prompt_tokens": 3, "completion_tokens": 6}})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    replace_guidellm(monkeypatch)
    with fake_endpoint(answer) as endpoint:
        yield endpoint


def replace_guidellm(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], object] = lambda scenario: None
) -> None:
    """Run the stand-in in guidellm's place, in a process as it does; `before` sees what it gets."""
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        assert command[1:5] == ["-m", "guidellm", "run", "-c"]
        before(json.loads(Path(command[5]).read_text())["spec"])
        return run([sys.executable, stand_in_guidellm.__file__, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.setattr(online, "find_spec", lambda name: object())


def sent(fake: FakeEndpoint) -> list[dict[str, Any]]:
    return [asked.body for asked in fake.asked if asked.path.endswith("completions")]


class TestScenario:
    def test_a_sweep_runs_all_combinations(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        numbers, page = tmp_path / "o.json", tmp_path / "o.html"
        result = bench(
            fake.url + "/v1",
            *("--dataset-name", "gsm8k", "--num-prompts", "3", "--max-concurrency", "1,2"),
            *("--request-rate", "100,inf", "--output-json", str(numbers), "--report", str(page)),
            *("--goodput", "ttft:500", "e2el:900", "--guidellm-dir", str(tmp_path / "kept")),
        )
        assert result.exit_code == 0, result.output
        runs = json.loads(numbers.read_text())["runs"]
        assert [(run["request_rate"], run["max_concurrency"]) for run in runs] == [
            (100, 1), (100, 2), ("inf", 1), ("inf", 2)
        ]  # fmt: skip
        for run in runs:
            assert set(run) >= VLLMS_KEYS
            assert (run["completed"], run["total_input_tokens"]) == (3, 9)
            assert run["output_throughput"] == pytest.approx(18 / run["duration"])
            assert run["request_goodput"] == pytest.approx(run["request_throughput"] / 2)
            assert (run["mean_ttft_ms"], run["p99_e2el_ms"]) == (0.5, 2000)
        assert len(sent(fake)) == 12
        assert "have no counters of diffusion" in result.output
        assert "good req/s" in page.read_text() and "http://127" in page.read_text()
        assert (tmp_path / "kept" / "run-4.html").exists()

    def test_arrivals(self) -> None:
        assert guidellm.profile(2.0, None) == {
            "kind": "poisson", "rate": [2.0], "max_concurrency": None
        }  # fmt: skip
        assert guidellm.profile(float("inf"), 3) == {"kind": "concurrent", "streams": [3]}
        assert guidellm.profile(float("inf"), None) == {
            "kind": "throughput", "max_concurrency": None
        }  # fmt: skip

    def test_bodies_say_what_was_typed(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        result = bench(
            fake.url,
            *custom(tmp_path / "own", "a", "b", max_tokens=9),
            *("--decoder", "fixed", "--set", "decoder.steps=4", "--temperature", "0"),
        )
        assert result.exit_code == 0, result.output
        first, second = sent(fake)
        assert [each["messages"][0]["content"] for each in (first, second)] == ["a", "b"]
        assert (first["max_tokens"], first["temperature"], first["ignore_eos"]) == (9, 0, False)
        assert first["diffusion"] == {"decoder": {"kind": "fixed", "steps": 4}}

    @pytest.mark.parametrize("typed", [True, False])
    def test_random_prompts_go_on(self, fake: FakeEndpoint, tmp_path: Path, typed: bool) -> None:
        flags = "--num-prompts", "1", "--input-len", "5", *(("--set", "ignore_eos=false") * typed)
        assert bench(fake.url, "--tokenizer", "demo", *flags).exit_code == 0
        (body,) = sent(fake)
        assert body["ignore_eos"] == (not typed)
        assert body["skip_special_tokens"] is False  # else an answer of end tokens has no time
        assert len(body["prompt"].split()) == 5

    def test_random_prompts_fit_the_context(self, fake: FakeEndpoint) -> None:
        flags = "--tokenizer", "demo", "--num-prompts", "1", "--random-prefix-len", "20"
        assert bench(fake.url, *flags, "--output-len", "30").exit_code == 0
        assert len(sent(fake)[0]["prompt"].split()) == 100 - 20 - 30
        assert "leave no room" in refused(fake.url, *flags, "--output-len", "80").splitlines()[-1]


class TestEndings:
    def test_failures_are_counted_and_reported(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        result = bench(fake.url, *custom(tmp_path / "a", "no", "yes", "no"))
        assert result.exit_code == 0, result.output
        assert "1 of 3" in result.output and "failed: 2 x" in result.output
        result = bench(fake.url, *custom(tmp_path / "b", "no"))
        assert result.exit_code == 1
        assert result.stderr.splitlines() == ["diffray: no request succeeded"]
        assert "the server answers 400: not that one" in result.stdout
        assert "counters" not in result.stdout

    def test_empty_answers_have_no_first_token(self, fake: FakeEndpoint, tmp_path: Path) -> None:
        numbers = tmp_path / "o.json"
        for prompts, ttft in ((("empty", "a"), 0.5), (("empty",), None)):
            flags = *custom(tmp_path / "own", *prompts), "--output-json", str(numbers)
            assert bench(fake.url, *flags).exit_code == 0
            (run,) = json.loads(numbers.read_text())["runs"]
            assert (run.get("mean_ttft_ms"), run["mean_tpot_ms"]) == (ttft, 0.25)

    def test_what_to_install_is_said_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(online, "find_spec", lambda name: None)
        said = refused("http://127.0.0.1:9")
        assert said == "diffray: bench serve needs guidellm; pip install 'diffray[bench]'"

    def test_a_generator_that_fails_is_quoted(
        self, fake: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = subprocess.CompletedProcess([], 2, stdout=b"usage\nno such profile\n")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        result = bench(fake.url, *custom(tmp_path / "own", "a"))
        assert result.exit_code == 1
        assert "guidellm failed: usage no such profile" in result.stderr

    def test_interrupts_keep_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Random prompts of one run must not be found in the cache by the next."""
        seeds: list[int] = []

        def pressed(scenario: Any) -> None:
            seeds.append(scenario["seed"]["value"])
            if len(seeds) == 3:
                raise KeyboardInterrupt

        replace_guidellm(monkeypatch, pressed)
        numbers = tmp_path / "o.json"
        with fake_endpoint(answer) as fake:
            flags = *custom(tmp_path / "own", "a"), "--max-concurrency", "1,2,3", "--seed", "7"
            result = bench(fake.url, *flags, "--output-json", str(numbers))
        assert result.exit_code == 130, result.output
        said = "diffray: interrupted after 2 of 3 runs"
        assert result.stderr.splitlines()[-1].startswith(said)
        found = json.loads(numbers.read_text())
        assert len(found["runs"]) == 2 and found["facts"]["interrupted"] == "after 2 of 3 runs"
        assert seeds == [7, 8, 9]

    def test_mistakes_are_one_sentence_before_anything_is_sent(self, fake: FakeEndpoint) -> None:
        for flags, says in (
            ("--goodput speed:3", "--goodput"),
            ("--goodput ttft:0", "--goodput"),
            ("--max-concurrency 0", "--max-concurrency"),
            ("--request-rate 0", "--request-rate"),
            ("--request-rate nan", "--request-rate"),
            ("--set max_tokens=7", "--output-len"),
            ("--set model=a", "--model"),
        ):
            said = refused(fake.url, *flags.split())
            assert said.startswith("diffray: ") and says in said
        assert not fake.asked


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["stand-in", "guidellm"])
def test_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: str) -> None:
    """The demo model behind HTTP: its counters agree with what the answers carried."""
    if generator == "stand-in":
        replace_guidellm(monkeypatch)
    elif not INSTALLED:
        pytest.skip("guidellm is not installed")
    numbers = tmp_path / "o.json"
    engine, tokenizer = load_local("demo", EngineConfig(max_num_seqs=4, dtype="float32"))
    with engine, serve_api(Service(engine, tokenizer, ("demo",))) as url:
        result = bench(
            url,
            *("--dataset-name", "demo,random", "--num-prompts", "6", "--input-len", "16"),
            *("--output-len", "64", "--max-concurrency", "4", "--decoder", "threshold"),
            *("--output-json", str(numbers)),
        )
    assert result.exit_code == 0, result.output
    assert "have no counters of diffusion" not in result.output
    demo, chance = json.loads(numbers.read_text())["runs"]
    for found in (demo, chance):
        assert set(found) >= VLLMS_KEYS and (found["completed"], found["failed"]) == (6, 0)
        assert found["diffusion_committed_tokens"] == found["total_output_tokens"]
        assert found["diffusion_committed_per_step"] >= 1
    assert chance["total_output_tokens"] == 6 * 64
    assert demo["diffusion_committed_per_step"] > 2
