"""Scores of answers known to be right or wrong, and estimates against their definitions."""

import math
import random
import time
from itertools import product
from pathlib import Path

import pytest

from diffray.cluster.cli.evaluation.sandbox import failure
from diffray.cluster.cli.evaluation.scorers import SCORERS, program
from diffray.cluster.cli.evaluation.statistics import (
    covered,
    difference,
    mean,
    p_value,
    pass_at,
    ratio,
)
from diffray.cluster.cli.evaluation.tasks import read_items

RETURN_SUM = {
    "prompt": 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(-1, 1) == 0\n",
}


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "wrong"),
    [
        ("exact", "a b", ["a b", " a b\n"], ["a  b", "A b", "", "a b."]),
        ("contains", "yes", ["so yes, it is"], ["Yes", ""]),
        ("regex", r"\d+ apples?", ["12 apples", "1 apple\n"], ["12 apples or so", "apples"]),
        (
            "choice", "B",
            ["B", "(B)", "The answer is B. Not C.", "I think the answer is (B)", "A look: B"],
            ["b", "A", "ABC", "", "B, no: the answer is C"],
        ),
        (
            "number", "1000",
            ["1000", "it is $1,000.", "first 5, then 1000.00", "\n#### 1,000"],
            ["100", "1000 or 7", "", "one", "-1000", "1000.5"],
        ),
        ("number", "-0.5", ["x = -0.5", "-.5", "\N{MINUS SIGN}0.5"], ["0.5", "5", "1-0.5"]),
        ("number", "5", ["10-5", "COVID-5", "1,2,5", "in all 0.5e1", "1,005, so 5"], ["1,2,35"]),
    ],
)  # fmt: skip
def test_right_and_wrong_texts(
    scorer: str, answer: str, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert SCORERS[scorer](text, {"answer": answer}) == 1, text
    for text in wrong:
        assert SCORERS[scorer](text, {"answer": answer}) == 0, text


def test_json_is_scored_by_fields_and_schemas() -> None:
    score, row = SCORERS["json"], {"answer": {"a": 1, "b": "x"}}
    for text, expected in (
        ('{"b": "x", "a": 1}', 1), ('```json\n{"a": 1, "b": "x"}\n```', 1), ('{"a": 1}', 0.5),
        ('{"a": 1, "b": "x", "c": 0}', 2 / 3), ("[1]", 0), ("{", 0), ("", 0), ('{"a": 2}', 0),
        ("[" * 5000, 0),
    ):  # fmt: skip
        assert score(text, row) == pytest.approx(expected), text
    schema = {"schema": {"type": "object", "required": ["a"]}}
    assert [SCORERS["schema"](text, schema) for text in ('{"a": 0}', "{}", "x")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("    return a + b\n", 1),
        ("    return a - b\n", 0),
        ("    return a + b\n\n\nprint(add(1))\n", 1),  # what follows the function is not run
        ("```python\ndef add(a, b):\n    return helper(a) + math.floor(b)\n```\nIt adds.", 1),
        ("Here it is:\n```\ndef add(a, b):\n    return a\n```", 0),
        ("    return a + b\n```\nIt adds.", 0),  # no answer of a chat
        ("```python3 \r\ndef add(a, b):\n    return a + b\n```", 1),
        ("1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```", 1),
        ("```sh\npip install x\n```\n```\ndef add(a, b):\n    return a + b\n```", 1),
        ("```\nfrom __future__ import annotations\ndef add(a, b):\n    return a + b\n```", 1),
        ("```\ndef add(a, b):\n    return a + b\nif __name__ == '__main__':\n    input()\n```", 1),
        ("def add(a, b):\n    import sys\n    sys.exit(0)", 0),
        ("def add(a, b:", 0),
        ("", 0),
    ],
)
def test_code_is_right_if_its_tests_pass(text: str, score: float) -> None:
    assert SCORERS["code"](text, RETURN_SUM) == score, program(text, RETURN_SUM)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("    return a + b\n", 1),
        ("    return a + b\n```\nIt adds.", 1),
        ("    return a + b\n\n\ndef add(a, b):\n    return 0\n", 1),
        ("def add(a, b):\n    return a + b\n", 1),
        ("    return a - b\n", 0),
        ("", 0),
    ],
)
def test_a_completion_is_the_function_s_rest(text: str, score: float) -> None:
    assert SCORERS["completion"](text, RETURN_SUM) == score


def test_humaneval_tells_solutions_from_stubs() -> None:
    for item in read_items("humaneval", 3):
        assert item.score("```python\n" + item.row["prompt"] + "    pass\n```") == 0
    solution = (
        "def has_close_elements(numbers, threshold):\n"
        "    found = sorted(numbers)\n"
        "    return any(b - a < threshold for a, b in zip(found, found[1:]))\n"
    )
    assert read_items("humaneval", 1)[0].score(f"```python\n{solution}```") == 1


ESCAPES = {
    "an endless loop": "while True: pass",
    "a loop that catches": "while 1:\n  try:\n    while True: pass\n  except BaseException: pass",
    "a long sleep": "import time; time.sleep(60)",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading; threading.Thread(target=print).start()",
    "a program": "import subprocess; subprocess.run(['true'])",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "10 GB": "x = bytearray(10 * 2**30)",
    "10 GB piecewise": "x = []\nwhile True: x.append(bytes(2**28))",
    "a file": "open(FILE, 'w').write('x')",
    "an appended file": "open(FILE, 'a').close()",
    "a removed file": "import os; os.unlink(KEPT)",
    "a renamed file": "import os; os.rename(KEPT, FILE)",
    "a changed mode": "import os; os.chmod(KEPT, 0)",
    "a folder": "import os; os.mkdir(FILE)",
    "a link": "import os; os.symlink('/', FILE)",
    "a socket": "import socket; socket.socket()",
    "a signal to the parent": "import os; os.kill(os.getppid(), 9)",
    "a signal to all": "import os; os.kill(-1, 9)",
    "a signal by fcntl": (
        "import fcntl, os\nfd = os.open('/proc/self/fd/1', 0)\n"
        "fcntl.fcntl(fd, fcntl.F_SETOWN, os.getppid())"
    ),
    "a lease": "import fcntl, os\nfcntl.fcntl(os.open(KEPT, 0), 1024, 1)",
    "advice": "import mmap\nmmap.mmap(-1, 4096).madvise(4)",
    "leaving early": "import sys; sys.exit(0)",
    "leaving at once": "import os; os._exit(0)",
    "leaving with success": "import os; os.write(1, b'ok'); os._exit(0)",
    "much output": "import os\nwhile True: os.write(1, bytes(2**16))",
    "a crash": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_the_sandbox_stops(name: str, tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("as it was")
    begin = time.monotonic()
    names = f"FILE, KEPT = {str(new)!r}, {str(kept)!r}\n"
    assert failure(names + ESCAPES[name], seconds=2) is not None
    assert time.monotonic() - begin < 10
    assert kept.read_text() == "as it was"
    assert kept.stat().st_mode & 0o400
    assert not new.exists()
    assert not new.is_symlink()


def test_the_sandbox_runs_what_calculates(tmp_path: Path) -> None:
    assert failure("print('x' * 10**6)\nassert sorted([2, 1]) == [1, 2]") is None
    modules = "math, re, collections, itertools, functools, typing, hashlib, heapq, copy, random"
    assert failure(f"import {modules}, string, datetime, decimal, fractions, statistics") is None
    assert failure("assert 1 == 2, 'no'") == "AssertionError: no"
    assert failure("import os\nassert not os.environ.get('HOME')") is None


def test_means_have_wilsons_interval() -> None:
    """The ends are the shares whose test just does not reject the mean."""
    for right, n in ((0, 10), (7, 10), (10, 10), (450, 500)):
        found = mean([1.0] * right + [0.0] * (n - right))
        assert found.value == right / n
        for end in found[1:]:
            if 1e-9 < end < 1 - 1e-9:
                z = abs(found.value - end) / math.sqrt(end * (1 - end) / n)
                assert z == pytest.approx(1.96, abs=1e-3)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draws, held, ratios, times = random.Random(0), 0, 0, 400
    for _ in range(times):
        first, other = (
            [float(draws.random() < share) for _ in range(100)] for share in (0.8, 0.75)
        )
        found = difference(first, other)
        held += found.low <= -0.05 <= found.high
        forwards = [draws.randint(4, 30) for _ in range(100)]
        tokens = [sum(draws.randint(1, 5) for _ in range(each)) for each in forwards]
        speed = ratio(tokens, forwards)
        ratios += speed.low <= 3 <= speed.high
    assert 0.92 < held / times < 0.99
    assert 0.9 < ratios / times < 0.99


def test_few_equal_scores_do_not_prove_that_nothing_is_lost() -> None:
    few, many = difference([1.0] * 10, [1.0] * 10), difference([1.0] * 2000, [1.0] * 2000)
    assert few.low == pytest.approx(-(1.96**2) / (10 + 1.96**2), abs=1e-3)
    assert -0.002 < many.low < 0


def test_p_values_are_those_of_all_signs() -> None:
    pairs = [0.5, -0.25, 1.0, 0.75, -0.5, 1.0]
    sums = [
        abs(sum(s * d for s, d in zip(signs, pairs, strict=True)))
        for signs in product((-1, 1), repeat=len(pairs))
    ]
    expected = sum(each >= abs(sum(pairs)) - 1e-9 for each in sums) / len(sums)
    assert p_value([0.0] * 6, pairs) == pytest.approx(expected, abs=0.02)
    assert p_value([1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]) == 2 / 2**5
    assert p_value([1, 0] * 2000, [0, 1] * 2000) == 1
    assert p_value([1.0] * 3, [1.0] * 3) == 1


def test_pass_at_k_is_the_share_of_all_choices_of_k() -> None:
    assert [pass_at(1, right, 5) for right in (0, 2, 5)] == pytest.approx([0, 0.4, 1])
    assert pass_at(2, 2, 5) == pytest.approx(1 - 3 / 10)
    assert pass_at(5, 1, 5) == 1


def test_time_counts_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4
    assert covered([]) == 0
