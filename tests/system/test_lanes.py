"""The rules by which a run chooses, limits and repeats tests, on a small tree of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.lanes import concerns
from tests.helpers.paths import ROOT
from tests.helpers.second_try import known

pytestmark = pytest.mark.long

PLUGINS = ["pytest_timeout", "tests.helpers.lanes", "tests.helpers.second_try"]
# Two long files, a quick test beside one of them, and one that always runs.
TREE = {
    "test_one.py": "import pytest\ndef test_quick(): pass\n@pytest.mark.long\ndef test_a(): pass\n",
    "test_two.py": "import pytest\n@pytest.mark.long\ndef test_b(): pass\n",
    "test_core.py": "import pytest\n@pytest.mark.long\n@pytest.mark.core\ndef test_c(): pass\n",
}


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n  long\n  core\n  rotate\n")
    for name, text in files.items():
        (folder / "tests" / name).write_text(text)
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    named = [word for plugin in PLUGINS for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", "-v", *named, *options]
    made = subprocess.run(
        command, cwd=folder, env=os.environ | alone, capture_output=True, text=True, timeout=60
    )
    return made.returncode, made.stdout + made.stderr


def ran(said: str) -> set[str]:
    return set(re.findall(r"::test_(\w+) PASSED", said))


def test_shards_share_out_all_long_tests_and_every_run_has_the_rest(tmp_path: Path) -> None:
    runs = [ran(run(tmp_path, TREE, f"--shard={part}/2")[1]) for part in (1, 2)]
    assert runs[0] & runs[1] == {"quick"}
    assert runs[0] | runs[1] == {"quick", "a", "b", "c"}
    with_core = [ran(run(tmp_path, TREE, f"--shard={part}/2", "--core")[1]) for part in (1, 2)]
    assert with_core == [each | {"c"} for each in runs]


def test_cases_take_turns(tmp_path: Path) -> None:
    files = {
        "test_many.py": (
            "import pytest\n@pytest.mark.rotate(2)\n"
            "@pytest.mark.parametrize('n', [*range(5), pytest.param(9, marks=pytest.mark.core)])\n"
            "def test_case(n): pass\ndef test_other(): pass\n"
        )
    }
    runs = [run(tmp_path, files, f"--turn={turn}")[1] for turn in (0, 1, 2, 3)]
    cases = [set(re.findall(r"case\[(\d)\] PASSED", said)) - {"9"} for said in runs]
    assert cases == [{"0", "1"}, {"2", "3"}, {"4", "0"}, {"1", "2"}]
    assert all("case[9] PASSED" in said and "other PASSED" in said for said in runs)
    assert run(tmp_path, files)[1].count("PASSED") == 7


def test_after_the_deadline_no_long_file_begins(tmp_path: Path) -> None:
    status, said = run(tmp_path, TREE, "--deadline=1", "--core")
    assert status == 0 and "not run for time: 2" in said
    assert ran(said) == {"quick", "c"}
    # A test that has failed is tried again all the same.
    (tmp_path / "tests/flaky.txt").write_text("")
    _, said = run(tmp_path, {}, "--again", "--deadline=1", "tests/test_two.py")
    assert ran(said) == {"b"}


def test_a_long_file_runs_when_what_it_imports_or_reaches_has_changed() -> None:
    text = "from diffray.workers.engine import Engine\nfrom tests.helpers.nodes import ask\n"
    file = "tests/system/test_nodes.py"
    for path in (file, "workers/engine.py", "tests/helpers/nodes.py", "cluster/serve/ingress.py"):
        assert concerns([path], file, text), path
    for path in ("workers/engine_news.py", "docs/usage.md", "tests/system/test_ingress.py"):
        assert not concerns([path], file, text), path


def test_a_change_is_what_git_says(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    run(tmp_path, TREE)
    for command in (["init", "-q"], ["add", "tests"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    run(tmp_path, {"test_two.py": TREE["test_two.py"] + "# changed\n"})
    subprocess.run([*git, "commit", "-qam", "second"], check=True)
    parts = [ran(run(tmp_path, {}, f"--shard={n}/3", "--since=HEAD~1")[1]) for n in (1, 2, 3)]
    assert all("b" in part for part in parts) and sum("a" in part for part in parts) == 1
    status, said = run(tmp_path, {}, "--shard=1/2", "--since=nowhere")
    assert status == pytest.ExitCode.USAGE_ERROR and "--since nowhere: " in said


def test_each_test_has_a_limit_and_long_computing_needs_a_mark(tmp_path: Path) -> None:
    limits = "lanes.LIMIT_S['quick'] = 2\nlanes.QUICK_CPU_S = 0.05\nlanes.COUNT_S = 9\n"
    files = {
        "conftest.py": f"from tests.helpers import lanes\n{limits}",
        "test_limits.py": (
            "import pytest, time\ndef test_hangs(): time.sleep(50)\n"
            "def compute():\n    end = time.process_time() + 0.2\n"
            "    while time.process_time() < end: pass\n"
            "def test_computes(): compute()\n@pytest.mark.slow\ndef test_marked(): compute()\n"
        ),
    }
    status, said = run(tmp_path, files)
    assert status == 1 and "Timeout" in said and "time.sleep(50)" in said
    assert ": mark it slow" in said
    assert ran(said) == {"marked"}


FAILS_ONCE = """
from pathlib import Path

def test_it():
    first = not Path("was here").exists()
    Path("was here").touch()
    assert not first
"""


def test_what_passes_at_the_second_try_only_must_be_known(tmp_path: Path) -> None:
    """Many failures are not tried again."""
    run(tmp_path, {"test_flaky.py": FAILS_ONCE})
    flaky = tmp_path / "tests/flaky.txt"
    flaky.write_text("Some words.\n")
    status, said = run(tmp_path, {}, "--again", "--last-failed")
    assert ran(said) == {"it"} and status == 1
    assert "tests/test_flaky.py::test_it failed, then passed" in said
    flaky.write_text("2026-01-01 tests/test_flaky.py::test_it -- it fails once\n")
    status, said = run(tmp_path, {}, "--again", "tests/test_flaky.py")
    assert ran(said) == {"it"} and status == 0 and "failed, then passed" not in said
    run(tmp_path, {"test_bad.py": "".join(f"def test_{n}(): assert 0\n" for n in range(4))})
    status, said = run(tmp_path, {}, "--again", "--last-failed")
    assert status == 1 and "4 tests failed; 3 at most are tried again" in said


def test_every_flaky_test_has_a_day_and_a_cause() -> None:
    lines = (ROOT / "tests/flaky.txt").read_text().splitlines()
    tests = [line for line in lines if line[:1].isdigit()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d tests/\S+\.py::.+ -- .{20,}", line) for line in tests)
    for test in known("\n".join(tests)):
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text()
