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
from hvd_ext.data import native as data_native
from hvd_ext.engine import native
from hvd_ext.errors import NativeLibraryError

# What is blocked raises ImportError when it is imported.
BLOCKED = ("tensorflow", "keras", "mpi4py", "horovod", "ctypes")
MODULES = {"data", "keras", "runner", "state", "tensorflow"}


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)


def test_the_package_imports_where_nothing_else_does_and_says_what_it_lacks_when_that_is_used() -> None:
    text = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
import hvd_ext as h
print(h.Average.name, h.errors.PlanError.__name__, h.__version__)
h.DistributedOptimizer
"""
    done = python(text)
    assert done.stdout.split() == ["Average", "PlanError", hvd_ext.__version__], done.stderr
    assert done.returncode != 0
    words = r"ModuleNotFoundError: hvd_ext.DistributedOptimizer needs (keras|tensorflow), .* `python -m hvd_ext doctor`"
    assert re.search(words, done.stderr), done.stderr


def test_the_import_loads_nothing_heavy_and_the_modules_of_the_package_when_they_are_used() -> None:
    text = """
import sys, hvd_ext as hvd
print(sorted(sys.modules))
print([hvd.state.register.__name__, hvd.data.shard.__name__, hvd.tensorflow.__name__, hvd.keras.__name__])
"""
    done = python(text)
    assert done.returncode == 0, done.stderr
    loaded, used = map(ast.literal_eval, done.stdout.splitlines())
    assert not set(loaded) & {*BLOCKED, "numpy", "yaml", "pydantic"}
    # of the package of Keras only what makes Keras find our classes in files
    assert {f"hvd_ext.{name}" for name in MODULES} & set(loaded) == {"hvd_ext.keras"}
    assert used == ["register", "shard", "hvd_ext.tensorflow", "hvd_ext.keras"]


def test_dir_shows_public_names_only() -> None:
    assert set(dir(hvd_ext)) == {*hvd_ext.__all__, *MODULES}
    assert {"init", "DistributedOptimizer", "callbacks", "__version__"} <= set(dir(hvd_ext))
    # a script that says `from hvd_ext import *` keeps its own keras
    assert not MODULES & set(hvd_ext.__all__)
    for module in (hvd_ext.keras, hvd_ext.tensorflow, hvd_ext.callbacks):
        assert dir(module) == sorted(hvd_ext.callbacks.__all__ if module is hvd_ext.callbacks else hvd_ext.__all__)


def test_the_stub_makes_each_name_public() -> None:
    stub = ast.parse(Path(hvd_ext.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*hvd_ext.__all__, *MODULES} == {"__version__", *(alias.name for alias in aliases)}
    assert [alias.name for alias in aliases if alias.asname != alias.name] == []


def test_every_public_name_loads_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in hvd_ext.__all__:
        assert getattr(hvd_ext, name) is not None
        assert name in dir(hvd_ext)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        hvd_ext.no_such_name  # noqa: B018


@pytest.mark.parametrize("library", [native, data_native], ids=["engine", "cache"])
@pytest.mark.parametrize(("content", "words"), [(None, "absent.so"), ("not a library", "does not load: .*absent.so")])
def test_a_library_that_is_missing_or_does_not_load_is_named_with_its_mend(
    library, content, words, monkeypatch, tmp_path
) -> None:
    path = tmp_path / "absent.so"
    if content:
        path.write_text(content)
    monkeypatch.setattr(library, "LIBRARY", path)
    with pytest.raises(NativeLibraryError, match=f"{words}.*python -m hvd_ext build"):
        library.load.__wrapped__()


@pytest.mark.parametrize("library", [native, data_native], ids=["engine", "cache"])
def test_a_library_of_another_version_is_refused_with_both_versions(library, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with pytest.raises(NativeLibraryError, match=f"version {seen}, this package needs 999"):
        library.load.__wrapped__()


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
