"""The package imports without TensorFlow, MPI, Horovod and native code, and says what is missing when it is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_ext
from hvd_ext import errors
from hvd_ext.engine import native
from hvd_ext.errors import NativeLibraryError

# What is blocked raises ImportError when it is imported.
BLOCKED = ("tensorflow", "keras", "mpi4py", "horovod", "ctypes")


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)


def test_the_package_imports_where_nothing_else_does() -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    done = python(f"{block}; import hvd_ext as h; print(h.Average.name, h.errors.PlanError.__name__, h.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Average", "PlanError", hvd_ext.__version__]


def test_what_needs_tensorflow_says_so_where_there_is_none() -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))"
    done = python(f"{block}; import hvd_ext; hvd_ext.DistributedOptimizer")
    assert done.returncode != 0
    words = r"ModuleNotFoundError: hvd_ext.DistributedOptimizer needs (keras|tensorflow), .* `python -m hvd_ext doctor`"
    assert re.search(words, done.stderr), done.stderr


def test_the_import_loads_none_of_them() -> None:
    done = python("import sys, hvd_ext; print(sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert not set(ast.literal_eval(done.stdout)) & {*BLOCKED, "numpy", "yaml", "pydantic"}


def test_the_modules_of_the_package_are_attributes_and_are_loaded_when_they_are_used() -> None:
    text = """
import sys, hvd_ext as hvd
loaded = [name for name in ("data", "keras", "runner", "state", "tensorflow") if f"hvd_ext.{name}" in sys.modules]
print([loaded, hvd.state.register.__name__, hvd.data.shard.__name__, hvd.tensorflow.__name__, hvd.keras.__name__])
"""
    done = python(text)
    assert done.returncode == 0, done.stderr
    # of the package of Keras only what makes Keras find our classes in files
    assert ast.literal_eval(done.stdout) == [["keras"], "register", "shard", "hvd_ext.tensorflow", "hvd_ext.keras"]


def test_dir_shows_public_names_only() -> None:
    modules = {"data", "keras", "runner", "state", "tensorflow"}
    assert set(dir(hvd_ext)) == {*hvd_ext.__all__, *modules}
    assert {"init", "DistributedOptimizer", "callbacks", "__version__"} <= set(dir(hvd_ext))
    # a script that says `from hvd_ext import *` keeps its own keras
    assert not modules & set(hvd_ext.__all__)
    for module in (hvd_ext.keras, hvd_ext.tensorflow, hvd_ext.callbacks):
        assert dir(module) == sorted(hvd_ext.callbacks.__all__ if module is hvd_ext.callbacks else hvd_ext.__all__)


def test_type_checkers_are_told_the_names_that_there_are() -> None:
    tree = ast.parse(Path(hvd_ext.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    told = {}
    for node in block.body:
        for alias in node.names:
            assert alias.asname == alias.name, f"write `{alias.name} as {alias.name}`: else it is private"
            told[alias.name] = node.module
    wanted = {name: module for module, names in hvd_ext._MODULES.items() for name in names}
    wanted |= dict.fromkeys(("data", "errors", "keras", "runner", "state", "tensorflow"), "hvd_ext")
    assert told == {**wanted, "callbacks": "hvd_ext.keras", "optimizers": "hvd_ext.keras"}


def test_every_public_name_loads_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in hvd_ext.__all__:
        assert getattr(hvd_ext, name) is not None
        assert name in dir(hvd_ext)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        hvd_ext.no_such_name  # noqa: B018


def test_a_missing_library_is_named_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", Path("nowhere/libhvd_ext_engine.so"))
    with pytest.raises(NativeLibraryError, match=r"nowhere/libhvd_ext_engine\.so.*python -m hvd_ext build"):
        native.load.__wrapped__()


def test_a_library_that_does_not_load_is_named_with_the_loaders_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.so").write_text("not a library")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "broken.so")
    with pytest.raises(NativeLibraryError, match=r"does not load: .*broken\.so.*python -m hvd_ext build"):
        native.load.__wrapped__()


def test_a_library_of_another_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = native.ABI_VERSION
    monkeypatch.setattr(native, "ABI_VERSION", 999)
    with pytest.raises(NativeLibraryError, match=f"version {seen}, this package needs 999"):
        native.load.__wrapped__()


def test_the_signatures_are_those_of_the_header() -> None:
    header = Path(__file__).resolve().parents[2] / "tf_ops" / "engine" / "api.h"
    declared = {word.split("(")[0].strip("*") for word in header.read_text().split() if word.startswith("hvd_ext_")}
    assert {name for name in declared if name[-1].isalnum()} == set(native.SIGNATURES)


def test_every_code_of_the_engine_is_an_exception_of_its_own() -> None:
    errors.raise_for(errors.OK, "nothing")
    raised = []
    for code in range(1, 6):
        with pytest.raises(errors.HvdExtError, match="words") as caught:
            errors.raise_for(code, "words")
        raised.append(caught.type)
    assert len(set(raised)) == 5
    with pytest.raises(errors.HvdExtError):
        errors.raise_for(99, "a code that does not exist")


def test_no_module_of_the_data_package_has_the_name_of_a_public_function() -> None:
    # the import of such a module would put it in the function's place
    from hvd_ext import data

    modules = {path.stem for path in Path(data.__file__).parent.glob("*.py")}
    assert not modules & set(data.__all__)
