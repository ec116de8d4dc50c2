"""How a public function takes the options of a reduction: its arguments are the fields of a class.

Type checkers and editors see the class's arguments, and so do `inspect.signature` and the docstring.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hvd_ext.options.gradients import GradientOptions
from hvd_ext.options.reduction import OPTIONS, ReductionOptions, option

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

FOLLOWING = "and so are all that follow."  # ends the last item of `Args` where another function describes the rest
_WIDTH = 116  # of the text of a docstring's item


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments(ReductionOptions):
    """The arguments of a function that reduces gradients, and with them Horovod's that are not options here."""

    num_groups: int = option(0, "Horovod's older name for groups.")
    device_dense: str = option("", "accepted for Horovod's sake, like device_sparse; changes nothing.")
    device_sparse: str = option("", "see device_dense.")

    def options(self) -> GradientOptions:
        """Return the options, checked; the function must call this directly, because a warning names its caller's line.

        Raises:
            InvalidError, PlanError: as `GradientOptions`.
        """
        values = {field.name: getattr(self, field.name) for field in OPTIONS}
        if self.num_groups:
            warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=4)
            values["groups"] = self.num_groups if self.groups is None else self.groups
        return GradientOptions(**values)


def takes(arguments: Callable[P, A], *, as_for: str = "") -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Make a function of one value into one that takes the arguments of the value's class.

    Args:
        arguments: the class, a dataclass. Fields that are made by `option` bring their text; the function's docstring
            describes the others.
        as_for: a function that takes the same options and describes them; its name stands for their texts.
    """

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        texts = {field.name: field.metadata.get("text", "") for field in dataclasses.fields(arguments)}  # type: ignore[arg-type]
        plain = inspect.signature(arguments)
        ordered = sorted(plain.parameters.values(), key=lambda argument: (argument.kind, bool(texts[argument.name])))
        signature = plain.replace(parameters=ordered, return_annotation=function.__annotations__["return"])
        described = {argument.name: texts[argument.name] for argument in ordered if texts[argument.name]}
        if as_for:
            described = {next(iter(described)): f"as for `{as_for}`, {FOLLOWING}"}

        @functools.wraps(function)
        def face(*positional: P.args, **named: P.kwargs) -> R:
            return function(arguments(*positional, **named))

        arguments.__init__.__qualname__ = function.__qualname__  # for Python's TypeErrors
        face.__signature__ = signature  # type: ignore[attr-defined]
        face.__annotations__ = {name: argument.annotation for name, argument in signature.parameters.items()}
        face.__annotations__["return"] = signature.return_annotation
        face.__doc__ = _with_items(inspect.getdoc(function) or "", described)
        return face

    return decorate


def _with_items(docstring: str, texts: dict[str, str]) -> str:
    """Append items to the section `Args` of a docstring, which is followed by `Returns`."""
    items = (
        textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent="        ")
        for name, text in texts.items()
    )
    described, returns, rest = docstring.partition("\n\nReturns:")
    return "\n".join([described, *items]) + returns + rest
