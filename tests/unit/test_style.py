"""Rules of the house as tests: layers, words."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hvd_ext", "tf_ops", "tests", "examples", "benchmarks", "docs", "docker", ".ci")
NOT_OURS = {"__pycache__", "lib", "results"}
HEAVY = {"tensorflow", "keras", "mpi4py", "horovod", "ctypes"}
CLOCK_AND_ENVIRONMENT = {"time", "datetime", "os.environ", "os.getenv", "os.putenv"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
# put together here so that this file does not name them itself
MACHINE_PATHS = re.compile(
    "|".join(["/wor" + "k/", "/tmp/" + "exp", "/far" + "m/", "/ho" + r"me/\w", "/ro" + r"ot/\w"])
)
LEFT_OPEN = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "TB" + "D", "XX" + "X"]) + r")\b")


def files(*suffixes: str) -> list[Path]:
    """Lists the repository's files with these suffixes."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = [path for path in found if path.suffix in suffixes or path.name in suffixes]
    return sorted(path for path in wanted if not NOT_OURS & set(path.relative_to(ROOT).parts))


def name(path: Path) -> str:
    """Gives a file's path in the repository."""
    return path.relative_to(ROOT).as_posix()


PYTHON = files(".py")
CXX = files(".cc", ".h")
TEXTS = files(".py", ".cc", ".h", ".def", ".md", ".toml", ".txt", ".yaml", ".sh", "Makefile", "Dockerfile", "run")


def test_the_files_are_found():
    names = {name(path) for path in TEXTS}
    assert {"setup.py", "hvd_ext/__init__.py", "tf_ops/engine/api.h", "README.md", ".ci/run", "Makefile"} <= names


def included(folder: str) -> dict[str, list[str]]:
    """Gives what each C++ file of a folder includes."""
    paths = [path for path in CXX if name(path).startswith(folder)]
    assert paths
    return {name(path): INCLUDE.findall(path.read_text(encoding="utf-8")) for path in paths}


def test_only_the_mpi_transport_includes_mpi_and_only_the_ops_tensorflow():
    including = {"mpi": set(), "tensorflow": set()}
    for path, headers in included("").items():
        for kind, pattern in (("mpi", r"mpi\.h"), ("tensorflow", r"(tensorflow|absl|Eigen|unsupported/Eigen)/")):
            including[kind] |= {path for header in headers if re.match(pattern, header)}
    # tests/native/mpi holds programs that start and end MPI around the transport
    mpi = {path for path in including["mpi"] if not path.startswith("tests/native/mpi/")}
    assert mpi == {"tf_ops/engine/mpi_job.h"}
    assert including["tensorflow"]
    assert [path for path in including["tensorflow"] if not path.startswith("tf_ops/ops/")] == []


def test_the_kernels_and_the_store_of_the_data_cache_need_nothing_of_the_engine_and_the_ops():
    kernels = {header for headers in included("tf_ops/kernels/").values() for header in headers}
    assert [header for header in kernels if header.startswith(("engine/", "ops/"))] == []
    store = {header for headers in included("tf_ops/cache/").values() for header in headers if "/" in header}
    assert [header for header in store if not header.startswith(("cache/", "base/", "shm/arena.h", "sys/"))] == []


def imports(tree: ast.AST) -> Iterator[str]:
    """Yields the modules that a file imports, and the dotted names of modules that it reads, as in os.environ."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Parses a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def offences(folder: str, forbidden: set[str]) -> dict[str, set[str]]:
    """Names the files of a folder that import what they must not, and what that is."""
    found: dict[str, set[str]] = {}
    for path in PYTHON:
        if name(path).startswith(folder):
            used = set(imports(parsed(path)))
            bad = {module for module in used for word in forbidden if f"{module}.".startswith(f"{word}.")}
            if bad:
                found[name(path)] = bad
    return found


# The layers of the package: a module imports from its own layer and from earlier ones.
LAYERS = (
    *("errors", "simulation", "state", "topology", "compression", "planning", "options", "engine", "trace", "job"),
    *("tensorflow", "runner", "cluster", "data", "keras", "elastic", "build", "doctor", "commands", "bench"),
    "__main__",
)
PACKAGE = {
    name(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
    for path in PYTHON
    if name(path).startswith("hvd_ext/")
}


def layer(module: str) -> str:
    """Names the layer of a module; `hvd_ext.tensorflow.keras` is the layer of Keras under Horovod's name for it."""
    return "keras" if module.startswith("hvd_ext.tensorflow.keras") else module.split(".")[1]


def needed(path: Path) -> set[str]:
    """Names the modules of the package that a file imports when it runs, in its functions too."""

    def found(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                yield from (names & PACKAGE.keys()) or {child.module} & PACKAGE.keys()
            elif isinstance(child, ast.Import):
                yield from {alias.name for alias in child.names} & PACKAGE.keys()
            yield from found(child)

    return set(found(parsed(path))) - {"hvd_ext"}


def test_no_module_imports_a_later_layer():
    assert {path.name for path in (ROOT / "hvd_ext").glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}
    graph = {module: needed(path) for module, path in PACKAGE.items() if module != "hvd_ext"}
    assert {layer(module) for module in graph} == set(LAYERS)
    place = {module: LAYERS.index(layer(module)) for module in graph}
    later = [f"{module} -> {other}" for module in graph for other in graph[module] if place[other] > place[module]]
    assert later == []


def test_no_imports_go_in_a_circle():
    graph = {module: needed(path) for module, path in PACKAGE.items() if module != "hvd_ext"}
    while leaves := [module for module, others in graph.items() if not others & graph.keys() - {module}]:
        for module in leaves:
            del graph[module]
    assert graph == {}


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("hvd_ext/simulation/", HEAVY | CLOCK_AND_ENVIRONMENT),
        ("hvd_ext/planning/", HEAVY | CLOCK_AND_ENVIRONMENT),
        ("hvd_ext/topology/", HEAVY),
        ("hvd_ext/", {"benchmarks", "docs", "tests"}),
    ],
)
def test_no_file_of_a_folder_imports_what_the_folder_must_not_know(folder, forbidden):
    assert any(name(path).startswith(folder) for path in PYTHON)
    assert offences(folder, forbidden) == {}


def test_only_the_keras_part_and_the_ops_need_tensorflow_at_import():
    allowed = ("hvd_ext/tensorflow/", "hvd_ext/keras/", "hvd_ext/elastic/", "hvd_ext/data/", "hvd_ext/bench/")
    eager = {}
    for path in PYTHON:
        if name(path).startswith("hvd_ext/") and not name(path).startswith(allowed):
            top = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
            used = set(imports(ast.Module(body=top, type_ignores=[])))
            if used & {"tensorflow", "keras", "mpi4py", "horovod"}:
                eager[name(path)] = used
    assert eager == {}


def test_every_python_file_says_what_it_is_and_postpones_annotations():
    assert [name(path) for path in PYTHON if not ast.get_docstring(parsed(path))] == []
    begins = {name(path): parsed(path).body[1] for path in PYTHON if len(parsed(path).body) > 1}
    late = [path for path, node in begins.items() if getattr(node, "module", "") != "__future__"]
    assert late == []


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yields the public functions, classes and methods of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue  # the definition behind it speaks for it
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, kinds) and not method.name.startswith("_"):
                        yield f"{node.name}.{method.name}", method


def test_every_public_name_of_the_package_says_what_it_does_in_a_sentence():
    wrong = {}
    for path in PYTHON:
        if name(path).startswith(("hvd_ext/", "benchmarks/studies/", "docs/", "setup.py")):
            for label, node in public_definitions(parsed(path)):
                first = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                if not first.endswith((".", ":")):
                    wrong[f"{name(path)}: {label}"] = first
    assert wrong == {}


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, LEFT_OPEN], ids=["machine paths", "left open"])
def test_no_file_knows_the_machine_it_was_written_on_or_leaves_something_open(pattern):
    found = {name(path): pattern.findall(path.read_text(encoding="utf-8")) for path in TEXTS}
    assert {key: words for key, words in found.items() if words} == {}


def test_every_skip_gives_a_reason():
    silent = []
    for path in PYTHON:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                said = bool(node.args) or any(keyword.arg == "reason" for keyword in node.keywords)
                if node.func.attr == "skipif":
                    said = any(keyword.arg == "reason" for keyword in node.keywords)
                if node.func.attr in ("skip", "skipif", "xfail") and not said:
                    silent.append(f"{name(path)}:{node.lineno}")
    assert silent == []


def loses_its_mark(text: str) -> bool:
    """Whether the mark of all tests of a file stands in something, as in the text of a program, and has no effect."""
    targets = [target for node in ast.parse(text).body if isinstance(node, ast.Assign) for target in node.targets]
    says = re.search(r"^\s*pytestmark\s*=", text, re.MULTILINE)
    return bool(says) and not any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def test_the_mark_of_a_file_stands_in_the_file_and_not_in_a_program_of_it():
    mark = "pytestmark = pytest.mark.slow\n"
    assert loses_its_mark(f'PROGRAM = """\n{mark}"""\n')
    assert not loses_its_mark(f'{mark}PROGRAM = """\n"""\n')
    tests = [path for path in PYTHON if name(path).startswith(("tests/", "benchmarks/tests/"))]
    assert [name(path) for path in tests if loses_its_mark(path.read_text(encoding="utf-8"))] == []


def test_the_design_page_is_short_and_wraps():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 5000
    assert [line for line in text.splitlines() if len(line) > 120] == []
