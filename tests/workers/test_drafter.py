"""A checkpoint with a drafter writes the model's own tokens, in fewer forwards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.golden import DRAFTS, EOS, MASK, cases_of
from diffray.components.checkpoints.folder import DRAFTER, resolve
from diffray.components.checkpoints.quantize import quantize_checkpoint
from diffray.components.lora import LoRA
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Change, Request
from diffray.workers.setup import build_rank
from tests.helpers.gguf_files import write
from tests.helpers.paths import GOLDEN
from tests.helpers.resuming import updates_of

AUTOREGRESSIVE = {"iteration": "autoregressive"}
NAMED = {"iteration": {"kind": "introspective", "early_stop": False}}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return an autoregressive checkpoint with a drafter, which names its mask token."""
    made = tmp_path / "bundle"
    made.mkdir()
    shutil.copy(GOLDEN / "ar_qwen3" / "config.json", made)
    shutil.copy(GOLDEN / "idlm" / "model.safetensors", made)
    add_drafter(made)
    return made


def add_drafter(folder: Path) -> None:
    shutil.copytree(GOLDEN / "idlm" / DRAFTS, folder / DRAFTER)
    file = folder / DRAFTER / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mask_token_id": MASK}))


def started(model: Path, mask: int | None = None) -> Engine:
    options = EngineOptions(
        dtype="float64", device="cpu", max_num_seqs=8, eos_token_id=EOS, mask_token_id=mask
    )
    return build_rank(str(model), options, Mesh())


def run(
    model: Path | Engine, *diffusions: dict[str, Any], lora: LoRA | None = None
) -> list[tuple[list[list[int]], int]]:
    """Return the tokens of some prompts under each policy, and their forwards."""
    engine, found = model if isinstance(model, Engine) else started(model), []
    for diffusion in diffusions:
        params = SamplingParams(max_tokens=40, ignore_eos=True, diffusion=diffusion)
        prompts = [tuple(case["prompt"]) for case in cases_of("idlm")[:4]]
        asked = [Request(*each, params, lora=lora) for each in enumerate(prompts)]
        updates = updates_of(engine, asked, 1)
        ids = [[i for u in updates if u.uid == uid for i in u.ids] for uid in range(len(prompts))]
        found.append((ids, sum(u.forwards for u in updates if u.finish_reason)))
    return found


def test_it_drafts_by_default_and_changes_no_token(bundle: Path) -> None:
    plain = bundle.parent / "plain"
    shutil.copytree(bundle, plain, ignore=shutil.ignore_patterns(DRAFTER))
    [(expected, forwards)] = run(plain, {})
    [(_, undrafted)] = run(started(plain, MASK), {"iteration": "introspective"})
    drafted, one_by_one, named = run(bundle, {}, AUTOREGRESSIVE, NAMED)
    assert [ids for ids, _ in (drafted, one_by_one, named)] == [expected] * 3
    assert one_by_one[1] == forwards
    assert drafted[1] == named[1] < undrafted < forwards


def test_another_adapter_changes_the_answer_and_not_the_drafter(bundle: Path) -> None:
    folder = bundle.parent / "own"
    shutil.copytree(GOLDEN / "idlm" / DRAFTS, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 30}))
    own = LoRA.loaded_now("own", str(folder))
    drafted, one_by_one = run(bundle, {}, AUTOREGRESSIVE, lora=own)
    assert drafted[0] == one_by_one[0] != run(bundle, {})[0][0]
    assert drafted[1] < one_by_one[1]


def test_new_weights_leave_the_drafter(bundle: Path) -> None:
    """From a folder without one, as a trainer saves it."""
    engine, plain = started(bundle), bundle.parent / "plain"
    shutil.copytree(bundle, plain, ignore=shutil.ignore_patterns(DRAFTER))
    assert engine.changes is not None
    assert engine.changes.apply(Change(1, "new", str(plain))) == ""
    drafted, one_by_one = run(engine, {}, AUTOREGRESSIVE)
    assert drafted[0] == one_by_one[0] and drafted[1] < one_by_one[1]


def test_a_quantized_copy_keeps_its_drafter(bundle: Path, tmp_path: Path) -> None:
    quantize_checkpoint(bundle, tmp_path / "smaller", "int8")
    drafted, one_by_one = run(tmp_path / "smaller", {}, AUTOREGRESSIVE)
    assert drafted[0] == one_by_one[0] and drafted[1] < one_by_one[1]


def test_a_folder_of_a_gguf_file_may_have_one(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "packed"
    folder.mkdir()
    write(folder / "model.gguf", "ar_qwen3")
    plain = resolve(folder)
    add_drafter(folder)
    assert resolve(folder) != plain and resolve(folder / "model.gguf") == plain
    drafted, one_by_one = run(folder, {}, AUTOREGRESSIVE)
    assert drafted[0] == one_by_one[0]
