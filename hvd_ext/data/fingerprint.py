"""What a function computes, as a digest: equal in every start of one script, another one when code or constants change.

A traced function is a graph. Each of its nodes gets the digest of its op, its attributes and its inputs' digests, so
that neither the names nor the order of nodes count: TensorFlow numbers names by what the process has traced before.
What a graph cannot show, the Python functions inside `tf.py_function` and `tf.numpy_function`, counts by its bytecode.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_ext.errors import InvalidError

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

# Attributes that say where or how something runs, and not what it computes.
_SILENT = {
    "shared_name",
    "container",
    "config_proto",
    "executor_type",
    "output_shapes",
    "parallel_iterations",
    "metadata",
}
_PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_LOOKUPS = {"LookupTableFind", "LookupTableFindV2"}


def of_function(function: Any, version: str = "") -> str:
    """Digest a traced function.

    Args:
        function: a `ConcreteFunction` of TensorFlow.
        version: the user's own word for what the function cannot show; another one gives another digest. With one the
            attributes of Python objects that it calls do not count.

    Returns:
        64 hexadecimal digits.

    Raises:
        InvalidError: the function uses something whose value cannot be known, and there is no version.
    """
    graph = function.graph
    definition = graph.as_graph_def()
    digests = _Graph({function.signature.name: function for function in definition.library.function}, version)
    nodes = {node.name: node for node in definition.node}
    names = {tensor.op.name: index for index, tensor in enumerate(graph.inputs)}
    captured = {tensor.op.name: external for external, tensor in graph.captures}
    known: dict[str, str] = {}
    for name, index in names.items():
        if name in captured:
            known[name] = of_parts("captured", digests.value(captured[name], function))
        else:
            known[name] = of_parts("argument", index)
    results = [digests.tensor(f"{tensor.op.name}:{tensor.value_index}", nodes, known) for tensor in graph.outputs]
    # what is done for its effect alone
    controls = sorted(digests.node(operation.name, nodes, known) for operation in graph.control_outputs)
    return of_parts("function", results, controls, repr(function.structured_outputs), version)


class _Graph:
    """The digests of one graph's functions, each made once."""

    def __init__(self, library: Mapping[str, Any], version: str) -> None:
        self._library, self._version = library, version
        self._functions: dict[str, str] = {}

    def tensor(self, name: str, nodes: Mapping[str, Any], known: dict[str, str]) -> str:
        """Digest a tensor, which is called "node", "node:0", "node:output:0" or, as a control input, "^node"."""
        if name.startswith("^"):
            return of_parts("control", self.node(name[1:], nodes, known))
        node, _, output = name.partition(":")
        return of_parts("output", self.node(node, nodes, known), output or "0")

    def node(self, name: str, nodes: Mapping[str, Any], known: dict[str, str]) -> str:
        """Digest a node; on a stack of our own, because graphs are deeper than Python's."""
        stack = [name]
        while stack:
            at = stack[-1]
            if at in known:
                stack.pop()
                continue
            node = nodes[at]
            missing = [source for source in map(_node_of, node.input) if source not in known]
            if missing:
                stack += missing
                continue
            stack.pop()
            data = [self.tensor(text, nodes, known) for text in node.input if not text.startswith("^")]
            control = sorted(self.tensor(text, nodes, known) for text in node.input if text.startswith("^"))
            known[at] = of_parts(node.op, self._call(node), self._attributes(node), data, control)
        return known[name]

    def _call(self, node: Any) -> str:
        """Digest what a node calls if it is an op named like a function, or a function of Python."""
        if node.op in self._library:
            return self.function(node.op)
        return self._python(node.attr["token"].s.decode()) if node.op in _PYTHON_OPS else ""

    def _attributes(self, node: Any) -> list[list[str]]:
        hidden = {"token"} if node.op in _PYTHON_OPS else set()
        return [
            [key, self.attribute(node.attr[key])]
            for key in sorted(node.attr)
            if not key.startswith("_") and key not in _SILENT | hidden
        ]

    def attribute(self, value: AttrValue) -> str:
        """Digest the value of an attribute."""
        import tensorflow as tf

        kind = value.WhichOneof("value")
        if kind == "func":
            inner = [[key, self.attribute(value.func.attr[key])] for key in sorted(value.func.attr)]
            return of_parts("func", self.function(value.func.name), inner)
        if kind == "tensor":
            return _array_digest(tf.make_ndarray(value.tensor))
        if kind == "list":
            inside = [self.function(function.name) for function in value.list.func]
            if inside:
                return of_parts("functions", inside)
        return of_parts(kind, value.SerializeToString(deterministic=True).hex())

    def function(self, name: str) -> str:
        """Digest a function of the graph's library."""
        if name not in self._library:
            return of_parts("op", name)
        if name not in self._functions:
            self._functions[name] = "recursive"
            definition = self._library[name]
            nodes = {node.name: node for node in definition.node_def}
            known = {arg.name: of_parts("argument", index) for index, arg in enumerate(definition.signature.input_arg)}
            results = [self.tensor(definition.ret[arg.name], nodes, known) for arg in definition.signature.output_arg]
            controls = sorted(self.node(target, nodes, known) for target in definition.control_ret.values())
            self._functions[name] = of_parts("function", results, controls)
        return self._functions[name]

    def value(self, tensor: Any, function: Any) -> str:
        """Digest the value of a captured tensor, variable or table."""
        import tensorflow as tf

        if tensor.dtype not in (tf.resource, tf.variant):
            return _array_digest(tensor.numpy())
        for variable in function.graph.variables:
            if variable.handle is tensor:
                return of_parts("variable", _array_digest(variable.numpy()))
        table = _table(tensor, function)
        if table is not None:
            return table
        if self._version:
            return of_parts("resource")
        raise InvalidError(
            f"load (a captured {tensor.dtype.name}): its value cannot be known, so that a change would not be seen; "
            "give version=, a word that you change whenever the data must be loaded again"
        )

    def _python(self, token: str) -> str:
        function = _python_function(token)
        if function is not None:
            return of_python(function, state=not self._version)
        if self._version:
            return ""
        raise InvalidError(
            "load (a Python function inside of it): its code cannot be found, so that a change would not be seen; give "
            "version=, a word that you change whenever the data must be loaded again"
        )


def of_graph(graph: Any, version: str = "") -> str:
    """Digest a graph with one result, such as that of a data set.

    Args:
        graph: a `GraphDef` whose result goes into a node `_Retval`.
        version: see `of_function`.

    Returns:
        64 hexadecimal digits.

    Raises:
        InvalidError: see `of_function`.
    """
    digests = _Graph({function.signature.name: function for function in graph.library.function}, version)
    nodes = {node.name: node for node in graph.node}
    known: dict[str, str] = {}
    results = [digests.node(node.name, nodes, known) for node in graph.node if node.op == "_Retval"]
    return of_parts("graph", results, version)


def of_parts(*parts: Any) -> str:
    """Digest several digests and values.

    Args:
        *parts: texts, numbers, and lists of them.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _node_of(text: str) -> str:
    return text.lstrip("^").partition(":")[0]


def _table(tensor: Any, function: Any) -> str | None:
    """Digest a lookup table by its entries; None if the captured tensor is none that a lookup uses."""
    import tensorflow as tf

    inner = {id(external): placeholder for external, placeholder in function.graph.captures}[id(tensor)]
    for operation in inner.consumers():
        if operation.type in _LOOKUPS:
            keys, values = tf.raw_ops.LookupTableExportV2(
                table_handle=tensor, Tkeys=operation.get_attr("Tin"), Tvalues=operation.get_attr("Tout")
            )
            pairs = zip(keys.numpy().tolist(), values.numpy().tolist(), strict=True)
            return of_parts("table", sorted(map(repr, pairs)))
    return None


def _python_function(token: str) -> Callable[..., Any] | None:
    """Find the Python function of a `tf.py_function`, which a graph names by a number that counts calls."""
    try:
        from tensorflow.python.ops import script_ops

        registered = script_ops._py_funcs._funcs[token]
    except (ImportError, AttributeError, KeyError):
        return None
    inner = getattr(registered, "_func", registered)  # that of an eager function
    return inner if callable(inner) else None


def of_python(function: Any, state: bool = True) -> str:
    """Digest the code of a Python function: bytecode, constants, the values and functions of its module that it uses.

    Args:
        function: a function, a method, a partial, or an object that can be called.
        state: count the attributes of objects that are called, or whose methods are, too.

    Returns:
        64 hexadecimal digits.
    """
    return _Code(state).digest(function, set())


class _Code:
    """The digests of Python code and values, with or without the attributes of objects that are called."""

    def __init__(self, state: bool) -> None:
        self._state = state

    def digest(self, value: Any, seen: set[int], called: bool = False) -> str:
        """Digest a value, of which a method may be called; objects in `seen` are digested further up."""
        if id(value) in seen:
            return "recursive"
        if isinstance(value, types.CodeType):
            constants = [self.digest(item, seen) for item in value.co_consts]
            return of_parts("code", value.co_code.hex(), constants, list(value.co_names), list(value.co_varnames))
        if isinstance(value, type(None) | bool | int | float | complex | str | bytes):
            return of_parts(type(value).__name__, repr(value))
        if isinstance(value, np.ndarray | np.generic):
            return _array_digest(np.asarray(value))
        if isinstance(value, weakref.ref):  # of `functions.Functions`
            return self.digest(value(), seen)
        if isinstance(value, tuple | list):
            return of_parts(type(value).__name__, [self.digest(item, seen) for item in value])
        if isinstance(value, set | frozenset):  # their order is that of this process alone
            return of_parts("set", sorted(self.digest(item, seen) for item in value))
        if isinstance(value, dict):
            pairs = [[self.digest(key, seen), self.digest(item, seen)] for key, item in value.items()]
            return of_parts("dict", sorted(pairs))
        seen = seen | {id(value)}
        if inspect.ismethod(value):
            owner = self.digest(value.__self__, seen, called=True)
            return of_parts("method", self._method(type(value.__self__), value.__func__, seen), owner)
        if isinstance(value, types.FunctionType):
            return self._function(value, seen)  # a decorator's: what it decorates is in its closure
        partial = [getattr(value, name, None) for name in ("func", "args", "keywords")]
        if callable(partial[0]):
            return of_parts("partial", [self.digest(item, seen) for item in partial])
        kind = type(value)
        attributes = (
            vars(value) if hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType) else {}
        )
        counted = self._state or not (called or callable(value))
        state = {
            name: item
            for name, item in attributes.items()
            if (counted and (_plain(item) or isinstance(item, tuple)))
            or (callable(item) and not isinstance(item, type))
        }
        named = isinstance(value, type | types.ModuleType)
        words = value.__name__ if named else f"{kind.__module__}.{kind.__qualname__}"
        call = self._method(kind, inspect.getattr_static(kind, "__call__", None), seen)
        return of_parts("object", words, call, self.digest(state, seen))

    def _method(self, kind: type, function: Any, seen: set[int]) -> str:
        """Digest a function of a class, with the functions and plain values of the class that it uses."""
        if id(function) in seen or not isinstance(function, types.FunctionType):
            return self.digest(function, seen)
        seen = seen | {id(function)}
        used: dict[str, Any] = {}
        for name in _names(function.__code__):
            value = inspect.getattr_static(kind, name, None)
            value = getattr(value, "__func__", getattr(value, "fget", value))  # class and static methods, properties
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                used[name] = self._method(kind, value, seen)
            elif _plain(value):
                used[name] = value
        return of_parts(self._function(function, seen), self.digest(used, seen))

    def _function(self, function: Any, seen: set[int]) -> str:
        code = function.__code__
        used: dict[str, Any] = {}
        for name in _names(code):
            value = function.__globals__.get(name)
            of_module = isinstance(value, types.FunctionType) and value.__module__ == function.__module__
            if of_module or isinstance(value, tuple | types.SimpleNamespace | argparse.Namespace) or _plain(value):
                used[name] = value
        cells: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells[name] = cell.cell_contents
            except ValueError:  # not bound yet
                continue
        inner = [code, function.__defaults__, function.__kwdefaults__, used, cells]
        return of_parts("python", [self.digest(item, seen) for item in inner])


def _plain(value: Any) -> bool:
    """Tell whether a value is a number, a text or an array, or a list, dictionary or set of such."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_plain, value))
    if type(value) is dict:
        return all(map(_plain, [*value, *value.values()]))
    return isinstance(value, type(None) | bool | int | float | complex | str | bytes | np.ndarray | np.generic)


def _names(code: types.CodeType) -> set[str]:
    """Give the global names that a function and the functions inside of it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _array_digest(value: Any) -> str:
    array = np.asarray(value)
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    if array.dtype.kind == "O":
        for text in array.ravel():
            data = text.encode() if isinstance(text, str) else text if isinstance(text, bytes) else repr(text).encode()
            digest.update(b"%d\0" % len(data) + data)
    else:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
