"""Checks of the rows of environment variables and of horovodrun's flags: pure, on one rank."""

from __future__ import annotations

import pytest

from docs.horovod import flags
from hvd_ext import options
from hvd_ext.errors import InvalidError
from hvd_ext.job import launch
from hvd_ext.options import environment as variables
from tests.ranks.migration.registry import check

# a text for each heeded variable, and what becomes of it
HEEDED = {
    "HOROVOD_FUSION_THRESHOLD": ("1048576", 1 << 20),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("7", 7.0),
    "HOROVOD_STALL_CHECK_DISABLE": ("1", 0.0),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("9", 9.0),
    "HOROVOD_TIMELINE": ("folder/timeline.json", "folder/timeline"),
}
# ours, which go before
OURS = {"bucket_nbytes": ("4096", 4096), "stall_warn_s": ("3", 3.0), "stall_fatal_s": ("4", 4.0), "trace": ("t", "t")}


def heeded(variable: variables.Variable) -> None:
    text, value = HEEDED[variable.name]
    assert getattr(options.from_environment({variable.name: text}), variable.field) == value
    setting = next(setting for setting in options.SETTINGS if setting.field == variable.field)
    own_text, own = OURS[variable.field]
    both = options.from_environment({variable.name: text, setting.name: own_text})
    assert getattr(both, variable.field) == own


def ignored(variable: variables.Variable) -> None:
    assert variables.unheeded({variable.name: "7"}) == [(f"{variable.name}=7", variable.note)]
    assert options.from_environment({variable.name: "7"}) == options.Options()


def refused(variable: variables.Variable) -> None:
    with pytest.raises(InvalidError, match="HOROVOD_"):
        launch.examine({variable.name: "1"})


def of_the_launcher(variable: variables.Variable) -> None:
    assert variables.unheeded({variable.name: "7"}) == []


KINDS = {
    variables.HEEDED: heeded,
    variables.IGNORED: ignored,
    variables.REFUSED: refused,
    variables.LAUNCHER: of_the_launcher,
}
for _variable in variables.VARIABLES:
    check(_variable.name)(lambda variable=_variable: KINDS[variable.status](variable))


def options_of_horovodrun() -> dict[str, str]:
    """Give each long flag of the installed horovodrun with the attribute that it sets."""
    runner = pytest.importorskip("horovod.runner.launch", reason="needs Horovod: python -m hvd_ext install-horovod")
    import argparse

    found: dict[str, str] = {}
    add = argparse._ActionsContainer.add_argument

    def noted(self: argparse._ActionsContainer, *names: str, **keywords: object) -> argparse.Action:
        action = add(self, *names, **keywords)
        found.update(dict.fromkeys(action.option_strings, action.dest))
        return action

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse._ActionsContainer, "add_argument", noted)
        patch.setattr("sys.argv", ["horovodrun", "-np", "1", "true"])
        runner.parse_args()
    return found


def flag_sets(flag: str, variable: str) -> None:
    """See that horovodrun makes this variable of this flag."""
    runner = pytest.importorskip("horovod.runner.launch", reason="needs Horovod: python -m hvd_ext install-horovod")
    from horovod.runner.common.util import config_parser

    attribute = options_of_horovodrun()[flag]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["horovodrun", "-np", "1", "true"])
        arguments = runner.parse_args()
    arguments.autotune = True  # the others of its kind depend on it
    arguments.timeline_filename = "file"
    setattr(arguments, attribute, "INFO" if attribute == "log_level" else 3)
    environ: dict[str, str] = {}
    config_parser.set_env_from_args(environ, arguments)
    assert variable in environ


for _flag, _variable_name in flags.VARIABLES.items():
    check(f"horovodrun {_flag}")(lambda flag=_flag, name=_variable_name: flag_sets(flag, name))


@check(*(f"horovodrun {flag}" for flag in (*flags.LAUNCHING.split(), *flags.ABOUT_HOROVOD.split(), "--jsrun")))
def launching() -> None:
    """horovodrun has these flags, and uses them without us."""
    assert set(flags.LAUNCHING.split()) | set(flags.ABOUT_HOROVOD.split()) | {"--jsrun"} <= set(options_of_horovodrun())


@check("horovodrun --gloo")
def gloo() -> None:
    """What --gloo sets is refused, with the flag to use."""
    with pytest.raises(InvalidError, match="horovodrun --mpi"):
        launch.examine({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})


@check(*(f"horovodrun {flag}" for flag in flags.ELASTIC.split()))
def elastic() -> None:
    """What the elastic launcher sets is refused, with the flag to use."""
    with pytest.raises(InvalidError, match="python -m hvd_ext run"):
        launch.examine({"HOROVOD_ELASTIC": "1"})
