"""Arrays by section and name in one file, without pickle: reading a file runs no code from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from hvd_ext.errors import CheckpointError

Sections = dict[str, dict[str, np.ndarray]]

# The entry that describes the entries "0", "1", ...: [section, name, dtype, shape] for each.
_INDEX = "index"


def write(file: BinaryIO, sections: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write arrays into a file as their bytes, so that every dtype comes back, bfloat16 too."""
    index, entries = [], {}
    for section, arrays in sections.items():
        for name, array in arrays.items():
            entries[str(len(index))] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
            index.append([section, name, _dtype_text(array.dtype), list(array.shape)])
    text = json.dumps({"sections": list(sections), "arrays": index})
    entries[_INDEX] = np.frombuffer(text.encode(), np.uint8)
    np.savez(file, **entries)


def read(file: BinaryIO) -> Sections:
    """Read writable arrays by section and name; `CheckpointError` if the file is not of `write`, or is damaged."""
    try:
        with np.load(file, allow_pickle=False) as entries:
            index = json.loads(entries[_INDEX].tobytes())
            sections: Sections = {section: {} for section in index["sections"]}
            for number, (section, name, dtype, shape) in enumerate(index["arrays"]):
                flat = np.frombuffer(bytearray(entries[str(number)].tobytes()), np.dtype(dtype))
                sections[section][name] = flat.reshape(shape)
    except Exception as error:  # NumPy, zip and JSON raise different ones for a file that is not theirs
        raise CheckpointError(f"not a file of a rank's state: {type(error).__name__}: {error}") from error
    return sections


def _dtype_text(dtype: np.dtype) -> str:
    # NumPy's code for a dtype that another library has added (bfloat16) means raw bytes; its name means the dtype
    return dtype.name if dtype.kind == "V" else dtype.str
