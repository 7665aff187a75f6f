"""The documents are right: examples and the notebook run, tables and paths are the code's."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.cli import main as cli
from diffray.components.checkpoints import folder as checkpoint
from diffray.components.checkpoints.demos import CHAT, DEMOS, EXAMPLE, FUNCTION, demo_path, examples
from diffray.components.mesh import Mesh
from diffray.components.models.advice import ADVICE
from diffray.components.models.registry import ARCHITECTURES, build_model
from examples.train_demo.documented import ANSWERS
from tests.helpers.decoding import DECIDED, accepted
from tests.helpers.paths import ROOT
from tests.helpers.tiny import CHAT_TEMPLATE, tiny_checkpoint
from tests.helpers.tiny_checkpoints import (
    DREAM,
    FAST_DLLM_V2,
    LLADA,
    LLADA2_MOE,
    LLADA_MOE,
    SDAR,
    SDAR_MOE,
)

CONFIGS = (DREAM, FAST_DLLM_V2, LLADA, LLADA2_MOE, LLADA_MOE, SDAR, SDAR_MOE)
README = ROOT / "README.md"
USAGE = ROOT / "docs/usage.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = ("kernels", "components", "workers", "cluster", "tests", "benchmarks", "docs", "examples")

# Where a prompt stands in a document: in a body, behind a command, in Python.
PROMPT = re.compile(
    r'"content": "([^"]+)"|diffray generate [^"\n]*"(\w[^"]+)"|echo "([^"]+)" \| diffray|'
    r'question = \(?\s*"([^"]+)"'
)
# Prompts that are put together: an instruction before each record, and a text with numbers.
RECORDS = re.compile(r'records = (\[.*?\])\n.*?llm\.decide\(records, .*?, ("[^"]+")\)', re.DOTALL)
TEMPLATE = re.compile(r'text = f("[^"]+")')
NUMBERS = {"boxes": 7, "each": 4, "sold": 9}

pytestmark = pytest.mark.skipif(
    not README.exists(), reason="the tests stand alone, without the source tree"
)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


def prompts(text: str) -> set[str]:
    """Return what a document asks a demo model."""
    asked = {"".join(found) for found in PROMPT.findall(text)}
    for records, instruction in RECORDS.findall(text):
        before = ast.literal_eval(instruction)
        asked |= {f"{before} {record}" for record in ast.literal_eval(records)}
    return asked | {ast.literal_eval(found).format(**NUMBERS) for found in TEMPLATE.findall(text)}


def run_blocks(document: Path, model: str, **names: object) -> dict[str, Any]:
    """Run a document's Python, with `model` in place of the demo, and return its names."""
    space: dict[str, Any] = {"__name__": document.stem, **names}
    for source in blocks(document, "python"):
        exec(compile(source.replace('"demo"', repr(model)), str(document), "exec"), space)
    return space


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model where it is installed, else a tiny one."""
    try:
        return str(checkpoint.resolve("demo"))
    except ValueError:
        folder = tmp_path_factory.mktemp("docs") / "model"
        return tiny_checkpoint(folder, "llada_moe", chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("decoder", ["threshold", "credit"])
@pytest.mark.parametrize("name", DEMOS)
def test_demo_models_answer_what_the_documents_ask(name: str, decoder: str) -> None:
    asked = set(examples(name))
    for document in (README, *DOCS, *ROOT.glob("[!.]*/**/README.md")):
        asked |= prompts(document.read_text()) - set(examples(CHAT))
    assert asked == ANSWERS.keys(), "say what is right, and of no other prompt"
    params = SamplingParams(diffusion={"decoder": {"kind": decoder}})
    with DiffusionLLM(name) as llm:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in ANSWERS], params)
    assert [output.outputs[0].text for output in outputs] == list(ANSWERS.values())


@pytest.mark.parametrize(
    ("document", "words"), [(README, r"\d+ tokens in \d+ forwards"), (USAGE, "masks left")]
)
def test_examples_run(
    document: Path, words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_blocks(document, model)
    printed = capsys.readouterr().out
    assert Path(model).name != DEMOS["demo"] or ANSWERS[names["question"]] in printed
    assert re.search(words, printed)
    assert document != README or names["output"].finished


@pytest.mark.slow
def test_picture_shows_the_answer_without_scripts(tmp_path: Path) -> None:
    """GitHub strips scripts and shows the picture from a file of its own."""
    picture = tmp_path / "denoising.svg"
    command = [sys.executable, str(ROOT / "examples/animate.py"), "--out", str(picture)]
    subprocess.run(command, check=True)
    for file in (picture, ROOT / "docs/denoising.svg"):
        root = ElementTree.parse(file).getroot()
        said = " ".join(str(each.text) for each in root if each.tag.endswith("desc"))
        assert EXAMPLE in said and ANSWERS[EXAMPLE] in said
        text = file.read_text()
        assert "<script" not in text and "href" not in text and len(text) < 150_000
        assert " 0 masks left" in text


def test_documented_commands_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_checkpoint(tmp_path_factory.mktemp("commands") / "model", "llada_moe")
    # The demo models as they are; in place of what would be downloaded, a tiny one.
    hub_id = re.compile(r"\w+/\S+")
    monkeypatch.setattr(
        checkpoint,
        "demo_path",
        lambda name: Path(tiny) if hub_id.fullmatch(name) else demo_path(name),
    )
    monkeypatch.chdir(tmp_path)
    commands = [
        line
        for document in (README, USAGE)
        for block in blocks(document, "bash")
        for line in block.splitlines()
        if line.startswith("diffray ")
    ]
    assert len(commands) >= 5
    for command in commands:
        _, *arguments = shlex.split(command.partition(" <")[0], comments=True)
        result = CliRunner().invoke(cli.app, arguments, input=f"{FUNCTION}\n")
        assert result.exit_code == 0, f"{command}\n{result.output}"
        if arguments[0] == "generate":
            prompt = next((text for text in arguments if text in ANSWERS), None)
            read = FUNCTION if "-" in arguments else EXAMPLE
            assert result.stdout == ANSWERS[prompt or read] + "\n", command


def test_the_page_of_models_names_every_family() -> None:
    assert set(ARCHITECTURES) <= set(re.findall(r"`(\w+)`", (ROOT / "docs/models.md").read_text()))


def test_models_has_the_advice_of_the_code() -> None:
    """What `diffray info` and /v1/models show; families with the same advice share a row."""
    families: dict[str, list[str]] = {}
    for family, advice in ADVICE.items():
        kinds = [
            ", ".join(kind if " " in kind else f"`{kind}`" for kind in part)
            for part in (advice.exact, advice.approximate)
        ]
        own = f"`{json.dumps(advice.recommended)}`" if advice.recommended else "the default"
        families.setdefault(" | ".join([*kinds, own, advice.source]), []).append(family)
    rows = [f"| {', '.join(names)} | {rest} |" for rest, names in families.items()]
    text = (ROOT / "docs/models.md").read_text()
    assert "\n".join(rows) in text, "\n".join(rows)
    built = {build_model(config, Mesh(), torch.float32).spec.family for config in CONFIGS}
    assert built <= ADVICE.keys() and len(built) == 7


def test_example_decoder_works(model: str) -> None:
    names = run_blocks(ROOT / "docs/add-a-decoder.md", model, accepted=accepted, DECIDED=DECIDED)
    names["test_top_n_takes_the_n_surest_masked_positions"]()
    if Path(model).name == DEMOS["demo"]:
        assert "12" in names["output"].outputs[0].text
    source = blocks(ROOT / "docs/add-a-decoder.md", "python")[0]
    assert len(source.splitlines()) < 60


def test_example_model_loads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_blocks(ROOT / "docs/add-a-model.md", "unused")
    monkeypatch.setitem(ARCHITECTURES, "SmallForDiffusion", names["build_small"])
    config = {
        "architectures": ["SmallForDiffusion"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 256, "rope_theta": 10000.0,
        "mask_token_id": 62, "eos_token_id": 63,
    }  # fmt: skip
    torch.manual_seed(0)
    parts = names["build_small"](config, Mesh(), torch.float32).parts(set())
    weights = {name: torch.randn(part.shape) * 0.3 for name, part in parts.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    with DiffusionLLM(str(tmp_path), dtype="float64") as llm:
        (cached,) = llm.generate([1, 2, 3])
        (recomputed,) = llm.generate([1, 2, 3], SamplingParams(diffusion={"cache": "none"}))
    assert cached.outputs[0].token_ids == recomputed.outputs[0].token_ids


@pytest.mark.parametrize("document", [README, *DOCS], ids=lambda path: path.name)
def test_references_lead_somewhere_and_no_machine_is_named(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!https://)([^)#]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+)`", outside)
    made_up = {
        "components/decoders/top_n.py", "components/models/small.py",
        "components/caches/doubling.py", "workers/features/at_most.py",
    }  # fmt: skip
    assert [path for path in paths if not (ROOT / path).exists() and path not in made_up] == []
    assert text.isascii() and not re.search(r"/(root|home|work)/", text)


def code_cells() -> list[str]:
    cells = json.loads((ROOT / "examples/denoising.ipynb").read_text())["cells"]
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
    displayed = [shown(source, space) for source in code_cells()]
    assert displayed[0].startswith("DiffusionLLM('demo', dtype=")
    pictures = [html for html in displayed if "data:image/svg+xml" in html]
    assert len(pictures) == 2 and all(len(html) < 200_000 for html in pictures)
    assert "tokens each" in capsys.readouterr().out
    masks = ast.literal_eval(displayed[4])
    assert masks == sorted(masks, reverse=True) and masks[-1] == 0 and len(masks) > 5
