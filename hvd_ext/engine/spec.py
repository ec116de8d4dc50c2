"""The structs of the C ABI, from tf_ops/engine/spec.def."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from hvd_ext.engine import libraries
from hvd_ext.errors import NativeLibraryError

_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
    "const char* const*": ctypes.POINTER(ctypes.c_char_p),
    "const int32_t*": ctypes.POINTER(ctypes.c_int32),
    "const int64_t*": ctypes.POINTER(ctypes.c_int64),
}
# A line's word, and what both languages read of it: a struct's name, or a field's type and name.
_LINE = re.compile(r"^HVD_EXT_(STRUCT|END|FIELD|TYPED|COUNT|LIST)\(([^,)]+)(?:, (\w+))?", re.MULTILINE)


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
            pointed = structs.get(kind.removeprefix("const ").removesuffix("*"))
            found = _TYPES.get(kind) if pointed is None else ctypes.POINTER(pointed)
            if found is None:
                raise NativeLibraryError(f"spec.def: the type of {name!r} ({kind}) is not known")
            fields.append((name, found))
    return structs


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


def _text() -> str:
    sources = libraries.native_sources()
    if sources is None:
        raise NativeLibraryError("spec.def is missing: the installation is incomplete; install hvd_ext again")
    return (sources / "engine" / "spec.def").read_text(encoding="utf-8")


_STRUCTS = parse(_text())
Config, Selection, Bucket, Partial, Channel = (
    _STRUCTS[f"HvdExt{name}"] for name in ("Config", "Selection", "Bucket", "Partial", "Channel")
)
