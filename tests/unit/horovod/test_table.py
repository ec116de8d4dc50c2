"""The table of migration is whole: all of Horovod has a row, every row has a check, and the page shows the rows."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

import hvd_ext
from docs import horovod
from docs.horovod import environment, flags
from docs.horovod.row import OTHER, REFUSED, SAME, Row
from tests.ranks.migration import callback_rows, collectives, life_rows, training_rows
from tests.ranks.migration.registry import CHECKS
from tests.unit.horovod import environment_rows, horovod_api

ROWS = horovod.rows()
FILLED_BY = (callback_rows, collectives, environment_rows, life_rows, training_rows)
CALLBACKS = [name for name, module in hvd_ext._NAMES.items() if module == "hvd_ext.keras.callbacks"]
NEEDS_HOROVOD = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="needs Horovod: python -m hvd_ext install-horovod"
)


def test_every_row_has_a_check_and_every_check_a_row() -> None:
    names = [row.horovod for row in ROWS]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert set(names) - set(CHECKS) == set()
    assert set(CHECKS) - set(names) == set()


def test_every_name_argument_and_variable_of_horovod_has_a_row() -> None:
    public, variables = horovod_api.frozen()
    rows = {row.horovod: row for row in ROWS}
    # what is refused as a whole has no rows for its arguments
    ours = [*hvd_ext.__all__, *(f"callbacks.{name}" for name in CALLBACKS)]
    taken = [name for name in public if name in rows and name in ours and rows[name].status != REFUSED]
    wanted = {*public, *(f"{name}({argument})" for name in taken for argument in public[name]), *variables}
    assert wanted - {"Compression"} - set(rows) == set()


@NEEDS_HOROVOD
def test_the_installed_horovod_has_what_was_written_down() -> None:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is installed, but not for TensorFlow")
    public, variables = horovod_api.frozen()
    assert horovod_api.public() == public
    assert horovod_api.variables() == variables


def names_of(function: object) -> list[str]:
    return [parameter.name for parameter in inspect.signature(function).parameters.values()]


@NEEDS_HOROVOD
@pytest.mark.parametrize("face", ["tensorflow", "tensorflow.keras", "keras"])
def test_arguments_have_horovods_order_or_the_page_says_that_they_need_their_names(face: str) -> None:
    theirs = pytest.importorskip(f"horovod.{face}", reason="Horovod is installed, but not for TensorFlow")
    ours = hvd_ext if face == "tensorflow" else importlib.import_module(f"hvd_ext.{face}")
    pairs = dict.fromkeys(dir(ours), (theirs, ours))
    if face != "tensorflow":
        pairs |= {f"callbacks.{name}": (theirs.callbacks, hvd_ext.callbacks) for name in dir(hvd_ext.callbacks)}
    rows = {row.horovod: row for row in ROWS}
    seen = 0
    for full, modules in pairs.items():
        name = full.rpartition(".")[2]
        if full not in rows or rows[full].status == REFUSED or not all(hasattr(one, name) for one in modules):
            continue
        values = [getattr(one, name) for one in modules]
        if not all(callable(value) for value in values) or name == "Compression":
            continue
        wanted, got = map(names_of, values)
        seen += 1
        notes = [rows[full].note, *(row.note for row in ROWS if row.owner == full and row.argument)]
        if got[: len(wanted)] != wanted and not any("by keyword" in note for note in notes):
            raise AssertionError(f"{face}: {full}{wanted} is here {got}")
    assert seen > 20


@NEEDS_HOROVOD
def test_every_flag_of_the_installed_horovodrun_has_a_row() -> None:
    rows = {row.horovod for row in ROWS}
    long = {name for name in environment_rows.options_of_horovodrun() if name.startswith("--")}
    twice = {"--help", "--min-num-proc", "--max-num-proc"}  # long names of flags that have a row
    assert {f"horovodrun {name}" for name in long - twice} - rows == set()


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.section in (environment.SECTION, flags.SECTION)], ids=lambda row: row.horovod
)
def test_the_row_is_true(row: Row) -> None:
    CHECKS[row.horovod]()


def test_what_is_the_same_has_its_name_here() -> None:
    for row in ROWS:
        if row.status == SAME and not row.horovod.startswith("horovodrun"):
            owner = row.owner.split(".")[0]
            assert owner in hvd_ext.__all__, row.horovod
            assert row.ours == (row.argument or row.horovod)


def test_what_is_not_the_same_says_why() -> None:
    assert [row.horovod for row in ROWS if row.status in (OTHER, REFUSED) and not row.note] == []
    assert {row.status for row in ROWS} == {SAME, OTHER, REFUSED}


@pytest.mark.parametrize("module", ["hvd_ext.tensorflow", "hvd_ext.keras", "hvd_ext.tensorflow.keras"])
def test_horovods_modules_have_all_names_under_ours(module: str) -> None:
    face = importlib.import_module(module)
    own = ("allreduce", "allgather", "broadcast", "reducescatter") if module.endswith("keras") else ()
    for name in set(hvd_ext.__all__) - {"__version__"}:
        assert name in dir(face)
        assert (getattr(face, name) is getattr(hvd_ext, name)) == (name not in own), name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        face.no_such_name  # noqa: B018


def test_the_callbacks_are_where_horovod_has_them() -> None:
    face = importlib.import_module("hvd_ext.tensorflow.keras.callbacks")
    for name in CALLBACKS:
        assert name in dir(face)
        assert getattr(face, name) is getattr(hvd_ext.callbacks, name)
    assert not hasattr(face, "no_such_name") and not hasattr(face, "__no_such_name__")


def test_a_star_import_brings_every_name() -> None:
    space: dict[str, object] = {}
    exec("from hvd_ext import *", space)
    assert set(hvd_ext.__all__) <= set(space)
