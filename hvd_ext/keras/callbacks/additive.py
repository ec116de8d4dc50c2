"""Which metrics keep a sum over samples, so that adding the ranks' states gives the state of all ranks' data.

The metrics of Keras do. A class derived from them, or from `keras.metrics.Metric`, does where each `update_state`
between it and Keras only adds to its variables; this is read from the source. What cannot be proved is not taken for a
sum.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_ADDS = ("assign_add", "assign_sub")
_FACTS = ("dtype", "shape", "name")


def why_not(metric: Any) -> str:
    """Tell, for a message, why a metric's variables are not known to be sums over samples; "" where they are."""
    kind = type(metric)
    if is_keras(kind):
        return ""
    for base in kind.__mro__:
        if "update_state" not in vars(base):
            continue
        if is_keras(base):
            break
        adds, calls_base = _read(vars(base)["update_state"], metric)
        if not adds:
            return f"{base.__name__}.update_state does more than add to its variables, or its source cannot be read"
        if not calls_base:
            break
    return "" if _begins_at_zero(metric) else f"{kind.__name__}.reset_state does not set its variables to 0"


def is_keras(kind: type) -> bool:
    """Tell whether a class is one of Keras 3 or Keras 2."""
    return kind.__module__.split(".")[0] in ("keras", "tf_keras")


def _begins_at_zero(metric: Any) -> bool:
    state = [np.asarray(variable).copy() for variable in metric.variables]
    metric.reset_state()
    zero = not any(np.any(np.asarray(variable)) for variable in metric.variables)
    for variable, value in zip(metric.variables, state, strict=True):
        variable.assign(value)
    return zero


def _read(function: Any, metric: Any) -> tuple[bool, bool]:
    """Tell whether an `update_state` only adds to the metric's variables, and whether it calls that of its base."""
    method = _parsed(inspect.unwrap(getattr(function, "python_function", function)))
    if method is None:
        return False, False
    me, body = method
    parents = {child: node for node in ast.walk(body) for child in ast.iter_child_nodes(node)}
    uses = [node for node in ast.walk(body) if isinstance(node, ast.Name)]
    bases = [node for node in uses if node.id == "super"]
    adds = all(_only_adds(node, metric, parents) for node in uses if node.id == me)
    calls = [parents[node] for node in bases]
    updated = all(isinstance(call, ast.Call) and _is_called(call, ("update_state",), parents) for call in calls)
    return adds and updated, bool(bases)


@functools.lru_cache(maxsize=128)
def _parsed(function: Callable[..., Any]) -> tuple[str, ast.FunctionDef] | None:
    """Parse a method: the name of its first parameter, and its definition; None where there is no source."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(node, ast.FunctionDef) or not node.args.args:
        return None
    return node.args.args[0].arg, node


def _only_adds(name: ast.Name, metric: Any, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether one use of `self` reads no state, and changes it only by adding."""
    attribute = parents[name]
    if isinstance(attribute, ast.Call) and isinstance(attribute.func, ast.Name) and attribute.func.id == "super":
        return True  # super(Class, self)
    if not isinstance(attribute, ast.Attribute) or not isinstance(attribute.ctx, ast.Load):
        return False
    static = inspect.getattr_static(metric, attribute.attr, None)
    if isinstance(static, property):
        return attribute.attr == "dtype"
    value = getattr(metric, attribute.attr, None)
    if hasattr(value, "assign"):
        return _adds_to(attribute, parents)
    if hasattr(value, "update_state"):
        return _is_called(attribute, ("update_state",), parents) and not why_not(value)
    if isinstance(value, list | tuple | dict):
        return not any(hasattr(part, "assign") or hasattr(part, "update_state") for part in tf.nest.flatten(value))
    return value is not None and getattr(value, "__self__", None) is not metric


def _adds_to(variable: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether a variable of `self` is in `v.assign_add(x)`, in `v.assign(v + x)`, or only asked for its shape."""
    use = parents[variable]
    if isinstance(use, ast.Attribute) and use.attr in _FACTS:
        return True
    if _is_called(variable, _ADDS, parents):
        return True
    if _is_called(variable, ("assign",), parents):  # the other use is in its argument
        call = parents[use]
        return isinstance(call, ast.Call) and len(call.args) == 1 and _is_sum_with(call.args[0], variable)
    call = parents[use]
    return (
        isinstance(use, ast.BinOp)
        and isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "assign"
        and ast.dump(call.func.value) == ast.dump(variable)
        and _is_sum_with(use, variable)
    )


def _is_sum_with(node: ast.expr, variable: ast.Attribute) -> bool:
    """Tell whether an expression is `v + x` or `x + v`, and x does not have v."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    wanted = ast.dump(variable)
    return [ast.dump(side) == wanted for side in (node.left, node.right)].count(True) == 1


def _is_called(node: ast.AST, methods: tuple[str, ...], parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether a node is the object of a call of one of these methods."""
    method = parents[node]
    call = parents.get(method)
    return (
        isinstance(method, ast.Attribute)
        and method.attr in methods
        and isinstance(call, ast.Call)
        and call.func is method
    )
