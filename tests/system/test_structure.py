"""The house rules a reader relies on: which room imports which, and what no room contains."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import diffray

PACKAGE = Path(diffray.__file__).parent
TESTS = Path(__file__).parents[1]
COMMANDS = [TESTS.parent / folder for folder in ("benchmarks", "tools")]
# Left to right: a room imports from itself and from the rooms before it.
ROOMS = ("kernels", "components", "workers", "cluster")
# The same within cluster; cluster/app.py is what a Serve config names.
CLUSTER_ROOMS = ("control", "api", "serve", "cli")
# Of tests/, what tests may import from.
SHARED = ("helpers", "mutants")
MAX_LINES = 350
MAX_FUNCTION_LINES = 60
# Names of several files about the same thing, such as a kernel and its layer.
SAME_CONCEPT = {
    *("app.py", "attention.py", "bad_words.py", "credit.py", "experts.py", "lora.py"),
    *("quantize.py", "quantized.py", "tool_calls.py"),
}
TORCH_RANDOM = ("rand", "bernoulli", "multinomial", "Generator")


def room_files(*rooms: str) -> list[Path]:
    """Paths below the package, as `kernels/attention.py`."""
    files = [file for room in rooms for file in sorted((PACKAGE / room).rglob("*.py"))]
    return [file.relative_to(PACKAGE) for file in files]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((PACKAGE / file).read_bytes())


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of every import; `from a import b` gives `a.b`."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{node.module or ''}.{alias.name}"


def attributes(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of every attribute, as `torch.distributed.all_reduce`."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def importers(module: str, *rooms: str) -> dict[str, str]:
    """Maps `file:line` to the name imported there, for every import of the module in the rooms."""
    return {
        f"{file}:{line}": name
        for file in room_files(*rooms)
        for line, name in imports(file)
        if is_within(name, module)
    }


def test_every_room_has_modules() -> None:
    assert [room for room in ROOMS if not room_files(room)] == []


def test_imports_point_leftwards() -> None:
    wrong = [
        f"{file}:{line} {name}"
        for index, room in enumerate(ROOMS)
        for file in room_files(room)
        for line, name in (*imports(file), *attributes(file))
        if is_within(name, "diffray") and name not in ("diffray", "diffray.__version__")
        if not any(is_within(name, f"diffray.{left}") for left in ROOMS[: index + 1])
    ]
    assert wrong == []


def test_imports_within_cluster_point_leftwards() -> None:
    wrong = [
        f"{file}:{line} {name}"
        for index, room in enumerate(CLUSTER_ROOMS)
        for file in room_files(f"cluster/{room}")
        for line, name in (*imports(file), *attributes(file))
        if is_within(name, "diffray.cluster")
        if not any(is_within(name, f"diffray.cluster.{r}") for r in CLUSTER_ROOMS[: index + 1])
    ]
    assert wrong == []


def test_no_test_imports_another() -> None:
    """What several need is in tests/helpers, or in a package of tools/ or benchmarks/."""
    wrong = [
        f"{file.relative_to(TESTS)}:{node.lineno} {node.module}"
        for file in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ImportFrom) and is_within(node.module or "", "tests")
        if not any(is_within(node.module or "", f"tests.{shared}") for shared in SHARED)
    ]
    assert wrong == []


def test_no_benchmark_or_tool_imports_a_test() -> None:
    wrong = {
        f"{file.relative_to(TESTS.parent)} {name}"
        for folder in COMMANDS
        for file in folder.rglob("*.py")
        for _, name in imports(file)
        if is_within(name, "tests")
    }
    assert wrong == set()


def test_rooms_are_never_imported_by_their_bare_names() -> None:
    assert {place: name for bare in ROOMS for place, name in importers(bare, *ROOMS).items()} == {}


def test_no_relative_imports() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file in room_files(*ROOMS)
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert wrong == []


def test_rooms_have_no_init_file() -> None:
    assert [file for file in room_files(*ROOMS) if file.name == "__init__.py"] == []


def test_ray_is_imported_only_by_the_cluster_and_the_worker_actor() -> None:
    found = importers("ray", "kernels", "components", "workers")
    assert {place for place in found if not place.startswith("workers/worker.py:")} == set()


def test_kernels_know_only_tensors() -> None:
    found = {}
    for module in ("transformers", "pydantic", "ray"):
        found.update(importers(module, "kernels"))
    assert found == {}


def test_torch_distributed_is_used_only_by_the_two_groups() -> None:
    groups = {Path("components/mesh.py"), Path("components/trainer_group.py")}
    wrong = [
        f"{file}:{line}"
        for file in room_files(*ROOMS)
        if file not in groups
        for line, name in (*imports(file), *attributes(file))
        if is_within(name, "torch.distributed")
    ]
    assert wrong == []


def test_rooms_draw_no_random_numbers_from_torch() -> None:
    wrong = [
        f"{file}:{line} {name}"
        for file in room_files(*ROOMS)
        for line, name in (*imports(file), *attributes(file))
        if (last := name.rpartition(".")[2]) == "manual_seed"
        or (is_within(name, "torch") and last.startswith(TORCH_RANDOM))
    ]
    assert wrong == []


def test_every_module_says_what_it_is_for() -> None:
    assert [file for file in room_files(*ROOMS) if not ast.get_docstring(tree(file))] == []


def test_no_room_file_is_too_long_to_read() -> None:
    lengths = {file: (PACKAGE / file).read_bytes().count(b"\n") for file in room_files(*ROOMS)}
    assert {file: length for file, length in lengths.items() if length > MAX_LINES} == {}


def test_no_function_is_too_long_to_read() -> None:
    """Triton's kernels may be: what Triton compiles calls few other functions."""
    lengths = {
        f"{file}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in room_files(*ROOMS)
        if not file.is_relative_to("kernels/triton")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {at: length for at, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_decoder_is_too_long_to_copy() -> None:
    lengths = {
        file: (PACKAGE / file).read_bytes().count(b"\n")
        for file in room_files("components/decoders")
    }
    assert {file: length for file, length in lengths.items() if length >= 60} == {}


def test_two_files_have_one_name_only_for_one_concept() -> None:
    """Triton's kernels have the names of those that they replace."""
    files = [f for f in room_files(*ROOMS) if not f.is_relative_to("kernels/triton")]
    twice = {name for name, count in Counter(file.name for file in files).items() if count > 1}
    assert twice == SAME_CONCEPT


def test_code_is_ascii() -> None:
    files = [PACKAGE / "__init__.py", *TESTS.rglob("*.py")]
    files += [PACKAGE / file for file in room_files(*ROOMS)]
    assert [str(file) for file in files if not file.read_bytes().isascii()] == []


def test_only_one_function_moves_tensors_to_the_device() -> None:
    """`backend.send` does not wait; a plain copy would, and the device then waits for the host."""
    found = []
    for file in room_files("kernels", "components", "workers"):
        for node in ast.walk(tree(file)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            given = [*node.args, *(k.value for k in node.keywords)]
            moves = name in ("to", "cuda") and any("device" in ast.unparse(x) for x in given)
            makes = name in ("tensor", "as_tensor") and any(
                k.arg == "device" for k in node.keywords
            )
            if moves or makes:
                found.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    assert {place.split(":")[0] for place in found} <= {
        "components/backend.py",
        "workers/rank.py",  # a checksum, for which it waits anyway
    }, found
