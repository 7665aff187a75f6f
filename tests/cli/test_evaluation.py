"""An evaluation asks all policies the same, loses and repeats nothing, and reports what is so."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diffray.cluster.api.batch_lines import Answer, Reply
from diffray.cluster.cli.evaluation import report as reports
from diffray.cluster.cli.evaluation.policies import NamedPolicy, alternatives, read_policies
from diffray.cluster.cli.evaluation.run import Asked, locked, run
from diffray.cluster.cli.evaluation.tasks import BUNDLED, read_items, tasks_of
from diffray.cluster.cli.main import app
from tests.helpers.api_server import serve_model

POLICIES = """
slow: {decoder: {kind: fixed, steps: 32}, canvas: fixed, block_length: 32, cache: none}
fast: {decoder: {kind: threshold, threshold: 0.9}, cache: dual}
drawn: {temperature: 0.7, top_k: 8}
"""


def command(out: Path, *more: str) -> list[str]:
    policies = out.with_suffix(".yaml")
    policies.write_text(POLICIES)
    start = ["eval", "demo", "--tasks", "demo", "--limit", "12", "--policies", str(policies)]
    return [*start, "--out", str(out), *more]


def evaluate(out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, command(out, *more))


def rows_of(out: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return all rows, of which each answer has one, without what differs between runs."""
    found = {}
    for path in sorted(out.glob("*/rows.jsonl")):
        for text in path.read_text().splitlines():
            row = json.loads(text)
            assert row.pop("seconds") > 0
            assert row.pop("began") > 0
            name = row["policy"], row["item"], row["sample"]
            assert name not in found
            found[name] = row
    return found


LOCAL = ("--dtype", "float64", "--device", "cpu")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("eval") / "whole"
    result = evaluate(out, *LOCAL)
    assert result.exit_code == 0, result.output
    return out


class TestRun:
    def test_rows_and_report_tell_the_same(self, done: Path) -> None:
        rows, summary = rows_of(done), json.loads((done / "summary.json").read_text())
        assert len(rows) == 36
        assert list(summary["policies"]) == ["slow", "fast", "drawn"]
        made = summary["tasks"]["demo"]
        for policy, own in made.items():
            mine = [row for row in rows.values() if row["policy"] == policy]
            assert own["accuracy"][0] == pytest.approx(sum(row["score"] for row in mine) / 12)
            assert own["tokens"] == sum(len(row["tokens"]) for row in mine)
            assert own["forwards"] == sum(row["forwards"] for row in mine)
            assert own["tokens_per_forward"][0] == pytest.approx(own["tokens"] / own["forwards"])
            for row in mine:
                assert len(row["tokens"]) == len(row["steps"]) == len(row["logprobs"])
        assert made["fast"]["tokens_per_forward"][0] > 2 * made["slow"]["tokens_per_forward"][0]
        assert made["slow"]["accuracy"][0] > 0.6
        assert "to_first" not in made["slow"]
        page = (done / "report.html").read_text()
        assert "Plotly.newPlot" in page
        assert 'src="http' not in page.replace("'", '"').partition("Plotly.newPlot")[2]
        assert "<link" not in page

    @pytest.mark.slow
    def test_it_goes_on_where_it_was_killed(self, done: Path, tmp_path: Path) -> None:
        out = tmp_path / "killed"
        process = subprocess.Popen(
            [sys.executable, "-m", "diffray", *command(out, *LOCAL, "--concurrency", "2")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        answers = out / "slow" / "answers.jsonl"
        until = time.monotonic() + 120
        while not (answers.exists() and answers.read_text().count("\n") >= 3):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kept = answers.read_text().splitlines(keepends=True)[:3]
        answers.write_text("".join(kept) + kept[-1][:50])  # cut off while it was written
        result = evaluate(out, *LOCAL, "--concurrency", "2")
        assert result.exit_code == 0, result.output
        assert answers.read_text().startswith("".join(kept))
        assert rows_of(out) == rows_of(done)
        before = (out / "summary.md").read_text()
        assert evaluate(out, *LOCAL, "--concurrency", "2").exit_code == 0
        assert (out / "summary.md").read_text() == before

    def test_other_requests_into_the_same_folder_are_refused(self, done: Path) -> None:
        kept = (done / "fast" / "answers.jsonl").read_bytes()
        for more in ("--seed 7", "--concurrency 1", "--quantization int8", "--max-num-seqs 2"):
            result = evaluate(done, *LOCAL, *more.split())
            assert result.exit_code == 1
            assert "holds answers to other requests" in result.stderr
        assert (done / "fast" / "answers.jsonl").read_bytes() == kept

    @pytest.mark.slow
    def test_a_server_gives_the_same_texts(self, done: Path, tmp_path: Path) -> None:
        with serve_model("demo") as server:
            result = evaluate(tmp_path / "served", "--base-url", server.url)
        assert result.exit_code == 0, result.output
        assert rows_of(tmp_path / "served") == rows_of(done)


class TestReport:
    def test_the_first_policy_is_what_others_are_compared_with(self, tmp_path: Path) -> None:
        """Of ten questions the second policy answers two more, in a tenth of the time."""
        right = {"a": {0, 1, 2, 3, 4}, "b": {0, 1, 2, 3, 4, 5, 6}, "c": {0}}

        @asynccontextmanager
        async def backend(_: dict[str, Any]) -> AsyncGenerator[Answer, None]:
            async def answer(url: str, body: dict[str, Any]) -> Reply:
                number = int(body["messages"][0]["content"])
                name = body["diffusion"]["cache"]["kind"][0]
                text = "yes" if number in right[{"d": "a", "e": "b", "v": "c"}[name]] else "no"
                return Reply(200, "id", made(text))

            yield answer

        data = tmp_path / "t.jsonl"
        lines = [json.dumps({"prompt": str(n), "answer": "yes"}) for n in range(10)]
        data.write_text("\n".join(lines))
        named = [
            NamedPolicy(name, {"diffusion": {"cache": {"kind": kind}}})
            for name, kind in (("a", "dual"), ("b", "exact"), ("c", "vicinity"))
        ]
        asked = Asked("m", read_items(str(data), None), concurrency=2)
        summary, rows, failures = run(tmp_path / "out", asked, named, backend)
        assert (summary.answered, len(rows), failures) == (30, 30, [])
        for row in rows:
            row["began"], row["seconds"] = 0.0, {"a": 10.0, "b": 1.0, "c": 0.5}[row["policy"]]
        found = reports.report(named, rows, {"model": "m", "concurrency": 2})["tasks"]["t"]
        assert [own["accuracy"].value for own in found.values()] == [0.5, 0.7, 0.1]
        assert found["b"]["to_first"]["difference"].value == pytest.approx(0.2)
        assert found["b"]["to_first"]["p"] == 0.5, "two of two: as likely as heads twice, or tails"
        assert found["c"]["to_first"]["difference"].high < 0
        assert found["c"]["to_first"]["p"] == 2 / 2**4
        assert found["b"]["to_first"]["equal_answers"] == pytest.approx(0.8)
        assert [name for name, own in found.items() if own.get("on_front")] == ["b", "c"]
        table = [line for line in reports.cells(found)]
        assert [line[0] for line in table] == ["a", "b *", "c *"]
        assert [line[-1] for line in table] == ["", "10.00", "20.00"]

    def test_failed_requests_are_no_wrong_answers_and_are_asked_again(self, tmp_path: Path) -> None:
        data = tmp_path / "t.jsonl"
        data.write_text("".join(f'{{"prompt": "{n}", "answer": "yes"}}\n' for n in range(4)))
        asked = Asked("m", read_items(str(data), None))
        broken, foreign = {"2"}, {"3"}

        @asynccontextmanager
        async def backend(_: dict[str, Any]) -> AsyncGenerator[Answer, None]:
            async def answer(url: str, body: dict[str, Any]) -> Reply:
                if body["messages"][0]["content"] in broken:
                    return Reply(400, "id", {"error": {"message": "too long"}})
                if body["messages"][0]["content"] in foreign:
                    return Reply(200, "id", {"choices": [{"message": {"content": "yes"}}]})
                return Reply(200, "id", made("yes"))

            yield answer

        _, rows, failures = run(tmp_path / "out", asked, [NamedPolicy("p")], backend)
        assert [row["score"] for row in rows] == [1, 1]
        assert "too long" in failures[0] and "has no trajectory" in failures[1]
        broken.clear()
        foreign.clear()
        summary, rows, failures = run(tmp_path / "out", asked, [NamedPolicy("p")], backend)
        assert (summary.before, summary.answered, len(rows), failures) == (2, 2, 4, [])

    def test_samples_have_passes_if_all_are_right_or_wrong(self) -> None:
        rows = [
            {"task": "t", "item": item, "score": score}
            for item, scores in (("a", [1, 0, 0]), ("b", [1, 1, 1]), ("c", [1, 0]))
            for score in scores
        ]
        assert reports.passes(rows) == {1: pytest.approx(2 / 3), 3: 1.0}, "c lacks an answer"
        assert reports.passes([*rows, {"task": "t", "item": "a", "score": 0.5}]) == {}
        assert reports.passes(rows[:1]) == {}

    def test_two_runs_do_not_write_into_one_folder(self, tmp_path: Path) -> None:
        with locked(tmp_path / "out"):
            said = evaluate(tmp_path / "out").stderr
            assert "another run writes into" in said
        (tmp_path / "file").write_text("")
        assert "is a file; name a folder" in evaluate(tmp_path / "file").stderr
        assert "name an empty folder" in evaluate(tmp_path).stderr

    def test_a_policy_that_fits_no_model_is_refused_before_others_run(self, tmp_path: Path) -> None:
        out, policies = tmp_path / "out", tmp_path / "p.yaml"
        policies.write_text("good: {cache: dual}\nbad: {cache: exact}\n")
        asked = ["eval", "demo", "--tasks", "demo", "--limit", "1", "--policies", str(policies)]
        result = CliRunner().invoke(app, [*asked, "--out", str(out), *LOCAL])
        assert "policy 'bad': " in result.stderr
        assert "does not fit this model" in result.stderr
        assert not (out / "good" / "answers.jsonl").read_text()

    def test_each_task_has_its_own_time(self, tmp_path: Path) -> None:
        """Two tasks of four answers, each of which takes a while: two run at once."""
        for name in "ab":
            lines = (json.dumps({"prompt": f"{name}{n}", "answer": "yes"}) for n in range(4))
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

        @asynccontextmanager
        async def backend(_: dict[str, Any]) -> AsyncGenerator[Answer, None]:
            async def answer(url: str, body: dict[str, Any]) -> Reply:
                prompt = body["messages"][0]["content"]
                await asyncio.sleep(0.3 if prompt == "a3" else 0.1)
                return Reply(200, "id", made("" if prompt == "a0" else "yes"))

            yield answer

        items = read_items(f"{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}", None)
        policy = NamedPolicy("p")
        _, rows, _ = run(tmp_path / "out", Asked("m", items, concurrency=2), [policy], backend)
        found = reports.report([policy], rows, {"concurrency": 2, "model": "m"})["tasks"]
        seconds = {name: made["p"]["seconds"] for name, made in found.items()}
        assert seconds["all"] == pytest.approx(seconds["a"] + seconds["b"])
        assert seconds["b"] == pytest.approx(0.2, abs=0.1)
        assert [*reports.remarks(found["a"])] == ["p: 1 empty answers"]


def made(text: str) -> dict[str, Any]:
    """Return an answer of two tokens and an end token."""
    return {
        "choices": [
            {
                "message": {"content": text},
                "finish_reason": "stop",
                "stop_reason": None,
                "trajectory": {"token_ids": [1, 2, 3], "steps": [0, 1, 1], "logprobs": [-1, -1, 0]},
            }
        ],
        "diffusion": {"forwards": 2},
        "usage": {"completion_tokens": 3},
    }


class TestPolicies:
    def test_lists_are_alternatives(self, tmp_path: Path) -> None:
        path = tmp_path / "p.yaml"
        path.write_text(
            "a: {decoder: {kind: threshold, threshold: [0.7, 0.9]}, cache: [none, dual]}\n"
            "b: {decoder: [{kind: fixed, steps: [8, 16]}, sequential], temperature: 0.5}\n"
            "c: {zero_confidence_token_ids: [1, 2], engine: {quantization: int8}}\n"
            "d:\n"
            "f: {diffusion: {cache: dual}}\n"
            "e: {decoder: [{kind: factor, factor: 1.0}, {kind: factor, factor: 0.5}]}\n"
        )
        found = {each.name: each for each in read_policies(path)}
        assert list(found) == [
            "a threshold=0.7 cache=none", "a threshold=0.7 cache=dual",
            "a threshold=0.9 cache=none", "a threshold=0.9 cache=dual",
            "b decoder=fixed steps=8", "b decoder=fixed steps=16", "b decoder=sequential",
            "c", "d", "f", "e decoder=factor,1.0", "e decoder=factor,0.5",
        ]  # fmt: skip
        assert found["a threshold=0.7 cache=dual"].request == {
            "diffusion": {"decoder": {"kind": "threshold", "threshold": 0.7}, "cache": "dual"}
        }
        assert found["b decoder=sequential"].request["temperature"] == 0.5
        assert found["c"].request == {"diffusion": {"zero_confidence_token_ids": [1, 2]}}
        assert (found["c"].engine, found["d"].request) == ({"quantization": "int8"}, {})
        assert found["f"].request == {"diffusion": {"cache": "dual"}}
        assert [label for label, _ in alternatives({"x": 1})] == [""]
        path.write_text("# tuned\ndecoder: {kind: factor, factor: 0.5}\ncache: dual\n")
        (alone,) = read_policies(path)
        assert (alone.name, alone.request["diffusion"]["cache"]) == ("p", "dual")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a: {decoder: {kind: threshold, treshold: 0.7}}", "'threshold'"),
            ("a: {cache: dua}", "policy 'a': "),
            ("a: {max_tokens: 5}", "the task's"),
            ("a: {engine: {dtyp: x}}", "policy 'a': "),
            ("a: [1]", "expected 'a'"),
            ("true: {cache: dual}", "expected True"),
            ("a: {decodr: threshold}", "did you mean 'decoder'"),
            ("a: {steps: 8}", "write diffusion: "),
            ("[1]", "expected names"),
            ("a: {", "line 1, column 5: "),
            ("a: {cache: dual}\na: {cache: none}", "given twice"),
            ("a: {cache: []}", "empty list"),
            ("a b: {cache: dual}\na_b: {cache: none}", "rename one"),
            ("a: {cache: [dual, dual]}", "rename one"),
            ("..: {cache: dual}", "no name for a folder"),
            ("a: {1: dual}", "unknown option 1"),
            ("a: {engine: [1]}", "engine a mapping"),
            ("a: &x {cache: *x}", "contains itself"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "p.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_policies(path)


class TestTasks:
    def test_bundled_tasks_are_as_published(self) -> None:
        sizes = {name: len(read_items(name, None)) for name in tasks_of(BUNDLED / "tasks.yaml")}
        assert sizes == {
            "gsm8k": 1319, "gsm8k-few-shot": 1315, "humaneval": 164, "humaneval-completion": 164,
            "demo": 400, "demo-harder": 400, "demo-json": 400, "demo-schema": 400,
        }  # fmt: skip
        first = read_items("gsm8k", 1)[0]
        assert first.prompt.startswith("Janet")
        assert first.score("She makes 9 * 2 = $18.00 a day.") == 1
        shots = read_items("gsm8k-few-shot", 1)[0].prompt
        assert shots.count("Question: ") == 5
        assert shots.endswith("\nAnswer:")

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ('{"prompt": "a"}', "line 1: the scorer 'exact' needs 'answer'"),
            ('{"question": "a", "answer": "b"}', "'prompt' is undefined"),
            ("[]", "line 1: expected an object"),
            ("{", "line 1: not valid JSON"),
            (
                '{"id": 1, "prompt": "", "answer": ""}\n{"id": 1, "prompt": "", "answer": ""}',
                "twice",
            ),
            ("", "too few"),
            ('{"messages": "hi", "answer": ""}', "must be a list of objects"),
        ],
    )
    def test_mistakes_in_data_are_named(self, tmp_path: Path, row: str, said: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(row)
        with pytest.raises(ValueError, match=said):
            read_items(str(path), None)

    def test_names_of_tasks_are_checked(self) -> None:
        for names, said in (
            ("gsm8", "did you mean 'gsm8k'"),
            ("demo,demo", "twice"),
            ("x.jsonl", "no such file"),
        ):
            with pytest.raises(ValueError, match=said):
                read_items(names, None)

    def test_a_file_describes_tasks(self, tmp_path: Path) -> None:
        (tmp_path / "t.yaml").write_text(
            "mine: {data: rows.jsonl, template: '{{ a }} + {{ b }} =', scorer: number, chat: false,"
            " stop: [X], guided: true, max_tokens: 9}\n"
        )
        rows = {"a": 1, "b": "{{ b }}", "answer": 3, "schema": {"type": "integer"}}
        (tmp_path / "rows.jsonl").write_text(json.dumps(rows))
        (item,) = read_items(str(tmp_path / "t.yaml"), None)
        assert (item.task, item.name, item.url) == ("mine", "1", "/v1/completions")
        assert item.body == {
            "prompt": "1 + {{ b }} =", "max_tokens": 9, "temperature": 0, "stop": ["X"],
            "structured_outputs": {"json": {"type": "integer"}},
        }  # fmt: skip
        assert item.score("so it is 3") == 1
        for text, said in (
            ("mine: {data: rows.jsonl, scorer: best}", "scorer"),
            ("mine: {data: rows.jsonl, template: '{{ 1 / 0 }}'}", "division by zero"),
            ("mine: {data: rows.jsonl, template: a, shots: 2}", "how many examples"),
            ("mine: {data: rows.jsonl, template: a, shots: 2, shot: b}", "too few"),
            ("mine: {data: rows.jsonl, template: a, scorer: regex}", "line 1: "),
            ("all: {data: rows.jsonl}", "may be called 'all'"),
            ("{}", "expected names"),
        ):
            (tmp_path / "t.yaml").write_text(text)
            tasks_of.cache_clear()
            with pytest.raises(ValueError, match=said):
                read_items(str(tmp_path / "t.yaml"), None)


def test_engines_are_not_changed_through_a_server(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("a: {engine: {quantization: int8}}")
    asked = ["eval", "demo", "--tasks", "demo", "--policies", str(tmp_path / "p.yaml")]
    result = CliRunner().invoke(
        app, [*asked, "--out", str(tmp_path / "o"), "--base-url", "http://127.0.0.1:1"]
    )
    assert "a running server cannot change" in result.stderr
