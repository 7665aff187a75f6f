"""docs/read-the-engine.md: what it names is there, is what runs, and can be read in one sitting."""

import ast
import re
import sys
from types import FrameType
from typing import Any, NamedTuple

from diffray import SamplingParams
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_engine
from tests.helpers.paths import GOLDEN, ROOT
from tests.helpers.toy import run

PAGE = (ROOT / "docs/read-the-engine.md").read_text()
MOST_FILES, MOST_LINES = 14, 1200
PAGES, PAGE_BYTES = 9, 65_536  # of eight positions; one of them is padding's


class Part(NamedTuple):
    file: str
    name: str  # empty: everything
    lines: int
    functions: set[str]  # one of them must run


def parts() -> list[Part]:
    found = []
    for file, what in re.findall(r"^\| \d+ \| `([^`]+)` \| (.+?) \| ", PAGE, re.M):
        source = (ROOT / file).read_text()
        known = definitions(ast.parse(source))
        names = re.findall(r"`([^`]+)`", what)
        if what == "everything":
            found.append(Part(file, "", len(source.splitlines()), {*known}))
        for name in names:
            node, methods = known[name], {each for each in known if each.startswith(f"{name}.")}
            stop = node.end_lineno
            if methods & {*names}:  # of the class itself, its fields
                stop = min(known[each].lineno for each in methods) - 1
            found.append(Part(file, name, stop - node.lineno + 1, methods or {name}))
    return found


def definitions(tree: ast.Module) -> dict[str, Any]:
    kinds = ast.ClassDef | ast.FunctionDef
    found = {node.name: node for node in tree.body if isinstance(node, kinds)}
    classes = [node for node in found.values() if isinstance(node, ast.ClassDef)]
    inner = {f"{c.name}.{n.name}": n for c in classes for n in c.body if isinstance(n, kinds)}
    return found | inner


def test_all_that_is_to_be_read_is_there_and_short() -> None:
    listed = parts()
    assert len({part.file for part in listed}) <= MOST_FILES
    lines = sum(part.lines for part in listed)
    stated = int(re.findall(r"([\d,]+) lines in 14 files", PAGE)[0].replace(",", ""))
    assert lines <= MOST_LINES and abs(lines - stated) <= 100


def test_all_that_is_to_be_read_runs() -> None:
    """For requests with the family, the decoder and the cache of the page; one is preempted."""
    called = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    options = {
        "mask_token_id": 510, "eos_token_id": 511, "dtype": "float64", "device": "cpu",
        "max_model_len": 64, "page_size": 8, "kv_cache_memory": PAGES * PAGE_BYTES,
    }  # fmt: skip
    diffusion = {
        "block_length": 8, "canvas_length": 16, "decoder": "threshold", "cache": "dual",
    }  # fmt: skip
    params = SamplingParams(max_tokens=24, ignore_eos=True, diffusion=diffusion)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine = build_engine(str(GOLDEN / "llada"), EngineOptions.model_validate(options))
        # Together they fit until their canvases grow.
        answers = run(engine, [Request(uid, tuple(range(20, 27)), params) for uid in (0, 1)])
    finally:
        sys.setprofile(before)
    assert len(answers[0]) == len(answers[1]) == 24 and engine.preemptions
    run_in = {(file.split("/diffray/")[-1].removeprefix(f"{ROOT}/"), name) for file, name in called}
    idle = [
        f"{part.file}: {part.name}"
        for part in parts()
        if part.name not in ("Window", "Batch", "Places", "OpenBlock", "Proposal")  # data
        and not any((part.file, name) in run_in for name in part.functions)
    ]
    assert idle == []
