"""The house rules a reader relies on: which room imports which, and what no room contains."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import diffray

PACKAGE = Path(diffray.__file__).parent
TESTS = Path(__file__).parents[1]
COMMANDS = [TESTS.parent / folder for folder in ("benchmarks", "tools")]
# Left to right: a room imports from itself and from the rooms before it.
ROOMS = ("kernels", "components", "workers", "cluster")
# The same within cluster; cluster/app.py is what a Serve config names.
CLUSTER_ROOMS = ("frontend", "control", "api", "serve", "cli")
# Of tests/, what tests may import from.
SHARED = ("helpers", "mutants")
MAX_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_DECODER_LINES = 59  # so that it can be copied
TORCH_RANDOM = ("rand", "bernoulli", "multinomial", "Generator")


def room_files(*rooms: str) -> list[Path]:
    """Paths below the package, as `kernels/attention.py`."""
    files = [file for room in rooms or ROOMS for file in sorted((PACKAGE / room).rglob("*.py"))]
    return [file.relative_to(PACKAGE) for file in files]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((PACKAGE / file).read_bytes())


@cache
def names(file: Path) -> frozenset[str]:
    """Return what is imported, and every attribute, as `torch.distributed.all_reduce`."""
    nodes = ast.walk(tree(file))
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(attributes | {*imports(file)})


def imports(file: Path) -> Iterator[str]:
    """Yields the dotted name of every import; `from a import b` gives `a.b`."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# Rooms that must not name a module, and the files that may nevertheless.
FORBIDDEN: list[tuple[tuple[str, ...], str, set[str]]] = [
    (ROOMS[:3], "ray", {"workers/worker.py"}),
    (("kernels",), "transformers", set()),
    (("kernels",), "pydantic", set()),
    (ROOMS, "torch.distributed", {"components/mesh.py", "components/trainer_group.py"}),
    *((ROOMS, bare, set()) for bare in ROOMS),
]


@pytest.mark.parametrize(("rooms", "module", "allowed"), FORBIDDEN)
def test_modules_stay_in_place(rooms: tuple[str, ...], module: str, allowed: set[str]) -> None:
    found = names if "." in module else imports
    wrong = [
        f"{file} {name}"
        for file in room_files(*rooms)
        if str(file) not in allowed
        for name in found(file)
        if is_within(name, module) or name.startswith(".")
    ]
    assert wrong == []


@pytest.mark.parametrize(("rooms", "package"), [(ROOMS, ""), (CLUSTER_ROOMS, "cluster/")])
def test_imports_point_leftwards(rooms: tuple[str, ...], package: str) -> None:
    dotted = f"diffray.{package.replace('/', '.')}"
    for index, room in enumerate(rooms):
        files = room_files(f"{package}{room}")
        wrong = [
            f"{file} {name}"
            for file in files
            for name in names(file)
            if is_within(name, dotted[:-1])
            if name not in ("diffray", "diffray.__version__")
            if not any(is_within(name, f"{dotted}{left}") for left in rooms[: index + 1])
        ]
        assert files and wrong == []


def test_no_test_imports_another_and_no_tool_a_test() -> None:
    """What several need is in tests/helpers, or in a package of tools/ or benchmarks/."""
    shared = tuple(f"tests.{folder}." for folder in SHARED)
    wrong = [
        f"{file} {name}"
        for folder in (TESTS, *COMMANDS)
        for file in folder.rglob("*.py")
        for name in imports(file)
        if is_within(name, "tests")
        if folder != TESTS or not name.startswith(shared)
    ]
    assert wrong == []


def test_rooms_draw_no_random_numbers_from_torch() -> None:
    wrong = [
        f"{file} {name}"
        for file in room_files()
        for name in names(file)
        if (last := name.rpartition(".")[2]) == "manual_seed"
        or (is_within(name, "torch") and last.startswith(TORCH_RANDOM))
    ]
    assert wrong == []


def test_every_module_says_what_it_is_for_and_is_short_enough_to_read() -> None:
    for file in room_files():
        assert ast.get_docstring(tree(file)) and file.name != "__init__.py", file
        most = MAX_DECODER_LINES if file.parent.name == "decoders" else MAX_LINES
        assert (PACKAGE / file).read_bytes().count(b"\n") <= most, file


def test_no_function_is_too_long_to_read() -> None:
    """Triton's kernels may be: what Triton compiles calls few other functions."""
    lengths = {
        f"{file}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in room_files()
        if not file.is_relative_to("kernels/triton")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {at: length for at, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_code_is_ascii() -> None:
    files = [PACKAGE / "__init__.py", *TESTS.rglob("*.py")]
    files += [PACKAGE / file for file in room_files()]
    assert [str(file) for file in files if not file.read_bytes().isascii()] == []


def test_only_one_function_moves_tensors_to_the_device() -> None:
    """`backend.send` does not wait; a plain copy would, and the device then waits for the host."""
    found = set()
    for file in room_files(*ROOMS[:3]):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rsplit(".", 1)[-1]
                given = [*node.args, *(k.value for k in node.keywords)]
                named = any(k.arg == "device" for k in node.keywords)
                moves = name in ("to", "cuda") and any("device" in ast.unparse(x) for x in given)
                if moves or (name in ("tensor", "as_tensor") and named):
                    found.add(str(file))
    # The second is a checksum, for which it waits anyway.
    assert found <= {"components/backend.py", "workers/rank.py"}
