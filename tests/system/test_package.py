"""What a user installs: cheap to import, complete, and nothing else in it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import diffray
from tests.helpers.paths import ROOT

PACKAGE = Path(diffray.__file__).parent
ROOMS = ("cluster", "components", "kernels", "workers")
# What a build needs of the source tree. The build runs in a copy: setuptools leaves folders behind.
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "diffray", *ROOMS, "tests")
# Modules of processes that start often, or that others wait for: torch takes seconds to import.
WITHOUT_TORCH = (
    *("cluster.control.grammar_worker", "cluster.control.coordinator", "cluster.serve.server"),
    "workers.worker",
)

needs_source_tree = pytest.mark.skipif(
    not (ROOT / "diffray").is_dir(), reason="the tests stand alone, without the source tree"
)


def run_python(code: str, path: Path, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap(tmp_path: Path) -> None:
    code = """
import sys, time
start = time.process_time()
import diffray
print(time.process_time() - start)
assert not {"torch", "transformers", "ray", "pydantic"} & set(sys.modules)
"""
    seconds = [float(run_python(code, PACKAGE.parent, tmp_path)) for _ in range(5)]
    assert min(seconds) < 0.3


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_starts_often_imports_no_torch(module: str, tmp_path: Path) -> None:
    code = f"""
import sys
import diffray.{module}
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    run_python(code, PACKAGE.parent, tmp_path)


def test_public_names_load_on_first_use() -> None:
    assert set(diffray.__all__) <= set(dir(diffray))
    for name in diffray.__all__:
        assert getattr(diffray, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        diffray.no_such_name  # noqa: B018


@needs_source_tree
def test_rooms_are_relative_links_or_unpacked_folders() -> None:
    for room in ROOMS:
        link = ROOT / "diffray" / room
        assert not link.is_symlink() or os.readlink(link) == f"../{room}"
        assert link.is_dir()


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"import sys; from setuptools import build_meta as m; print(m.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, links kept."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.core
@needs_source_tree
def test_wheel_holds_and_imports_the_package(source: Path, wheel: Path, tmp_path: Path) -> None:
    expected = {
        Path(folder, file).relative_to(source).as_posix()
        for folder, _, files in os.walk(source / "diffray", followlinks=True)
        for file in files
    }
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == expected
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    code = """
import diffray, diffray.cluster, diffray.components, diffray.kernels, diffray.workers
import diffray.cluster.cli.main
for name in diffray.__all__:
    getattr(diffray, name)
print(diffray.__file__)
print(diffray.workers.__path__[0])
"""
    found = run_python(code, site, elsewhere).split()
    assert found == [str(site / "diffray" / "__init__.py"), str(site / "diffray" / "workers")]


@pytest.mark.long
@needs_source_tree
def test_editable_install_works_in_the_checkout_and_beside_it(source: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "diffray"  # the folder that README clones into
    shutil.copytree(source, checkout, symlinks=True)
    venv.create(tmp_path / "venv")
    site = next(tmp_path.glob("venv/lib/python3*/site-packages"))
    with zipfile.ZipFile(build("editable", checkout, tmp_path)) as wheel:
        wheel.extractall(site)
    # The dependencies, whose folder's own .pth files Python does not read from here.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = """
import diffray
from diffray.components.checkpoints.demos import demo_path
assert diffray.DiffusionLLM.__module__ == "diffray.cluster.control.llm"
print(diffray.__file__)
print(demo_path("demo"))
"""
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    for folder in (checkout, tmp_path, tmp_path / "venv"):
        command = [str(tmp_path / "venv/bin/python"), "-c", code]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"in {folder}: {done.stderr}"
        package = checkout / "diffray"
        assert done.stdout.split() == [
            str(package / "__init__.py"),
            str(package / "demo/llada_moe"),
        ]


@pytest.mark.long
@needs_source_tree
def test_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path)
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
