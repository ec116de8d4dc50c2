"""The C ABI: its structs, from tf_ops/engine/spec.def, and its functions, from tf_ops/engine/api.h."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

from hvd_ext.engine import libraries
from hvd_ext.errors import NativeLibraryError

_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
}
# what is called before a step, with the channel and the step's number
# what C calls: before a step, with its channel and number; and with a channel that has stopped
AT_STEP = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
ON_STOPPED = ctypes.CFUNCTYPE(None, ctypes.c_int64)
# A line's word, and what both languages read of it: a struct's name, or a field's type and name.
_LINE = re.compile(r"^HVD_EXT_(STRUCT|END|FIELD|TYPED|COUNT|LIST)\(([^,)]+)(?:, (\w+))?", re.MULTILINE)
_FUNCTION = re.compile(r"^([a-z][\w *]*?)(hvd_ext_\w+)\((.*?)\);", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"(.+?)\w+(\[\d+\])?")  # its type, its name, and the number of elements of an array


def parse(text: str) -> dict[str, type[ctypes.Structure]]:
    """Make the structs of a text in the form of spec.def, by name.

    Raises:
        NativeLibraryError: a type is not known, or a field is in no struct.
    """
    structs: dict[str, type[ctypes.Structure]] = {}
    fields: list[tuple[str, Any]] | None = None
    for what, kind, name in _LINE.findall(text):
        if what == "STRUCT":
            fields = []
        elif fields is None:
            raise NativeLibraryError(f"spec.def: '{kind}, {name}' must be in a struct")
        elif what == "END":
            structs[kind] = type(kind, (ctypes.Structure,), {"_fields_": fields})
            fields = None
        else:
            fields.append((name, _type(kind, name, structs)))
    return structs


def signatures(header: str, structs: Mapping[str, type[ctypes.Structure]]) -> dict[str, tuple[Any, list[Any]]]:
    """Read the functions of a C header, by name: the result, which is None for a C void, and the arguments.

    Raises:
        NativeLibraryError: a type is not known.
    """
    found = {}
    for result, name, parameters in _FUNCTION.findall(re.sub(r"//.*", "", header)):
        arguments = []
        for words in re.split(r",\s*(?![^(]*\))", parameters) if parameters != "void" else ():
            parameter = _PARAMETER.fullmatch(words)
            if parameter is None:
                arguments.append(AT_STEP if "," in words else ON_STOPPED)  # the only pointers to functions
            else:
                arguments.append(_type(parameter[1] + "*" * bool(parameter[2]), name, structs))
        found[name] = _type(result, name, structs), arguments
    return found


def _type(kind: str, name: str, structs: Mapping[str, type[ctypes.Structure]]) -> Any:
    """Give the type that a C type has in ctypes."""
    words, pointers = "".join(re.sub(r"\bconst\b", "", kind).split()), 0
    types = {**_TYPES, **structs}
    while words not in types and words.endswith("*"):
        words, pointers = words[:-1], pointers + 1
    if words not in types:
        raise NativeLibraryError(f"the C interface: the type of {name!r} ({kind.strip()}) is not known")
    found = types[words]
    for _ in range(pointers):
        found = ctypes.POINTER(found)
    return found


def filled(struct: type[ctypes.Structure], **values: Any) -> ctypes.Structure:
    """Make a struct whose fields have the values of the same names.

    Raises:
        NativeLibraryError: a value has no field, or a field no value.
    """
    fields = {name for name, *_ in struct._fields_}
    for name in sorted(fields ^ values.keys()):
        rule = "has no value" if name in fields else "must be a field of it: add it to tf_ops/engine/spec.def"
        raise NativeLibraryError(f"{struct.__name__}: {name!r} {rule}")
    return struct(**values)


def _text(file: str) -> str:
    sources = libraries.native_sources()
    if sources is None:
        raise NativeLibraryError(f"{file} is missing: the installation is incomplete; install hvd_ext again")
    return (sources / "engine" / file).read_text(encoding="utf-8")


_STRUCTS = parse(_text("spec.def"))
Config, Selection, Bucket, Partial, Channel = (
    _STRUCTS[f"HvdExt{name}"] for name in ("Config", "Selection", "Bucket", "Partial", "Channel")
)
_HEADER = _text("api.h")
SIGNATURES = signatures(_HEADER, _STRUCTS)
ABI_VERSION = int(_HEADER.split("#define HVD_EXT_ABI_VERSION ")[1].split()[0])
