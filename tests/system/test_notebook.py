"""The notebook in examples/ runs from top to bottom, and shows what it says."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT

NOTEBOOK = ROOT / "examples/denoising.ipynb"

pytestmark = pytest.mark.skipif(
    not NOTEBOOK.exists(), reason="the tests stand alone, without the source tree"
)


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def shown(source: str, space: dict[str, Any]) -> str:
    """Run a cell as a notebook does; return how its last expression is displayed, if it has one."""
    body = ast.parse(source)
    last = body.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(body, "cell", "exec"), space)
        return ""
    del body.body[-1]
    exec(compile(body, "cell", "exec"), space)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    html = getattr(value, "_repr_html_", None)
    return str(html()) if html is not None else repr(value)


def test_the_notebook_runs_and_shows_the_denoising(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    displayed = [shown(source, space) for source in code_cells(NOTEBOOK)]
    assert displayed[0].startswith("DiffusionLLM('demo', dtype=")
    pictures = [html for html in displayed if "data:image/svg+xml" in html]
    assert len(pictures) == 2 and all(len(html) < 200_000 for html in pictures)
    assert "tokens each" in capsys.readouterr().out
    masks = ast.literal_eval(displayed[4])
    assert masks == sorted(masks, reverse=True) and masks[-1] == 0 and len(masks) > 5
