"""The structs of the C ABI come from one list, which C++ reads too."""

from __future__ import annotations

import ctypes

import pytest

from hvd_ext.engine import spec
from hvd_ext.errors import NativeLibraryError

TEXT = """
HVD_EXT_STRUCT(HvdExtPart)
HVD_EXT_FIELD(int32_t, number)  // a comment, (with brackets)
HVD_EXT_END(HvdExtPart)
HVD_EXT_STRUCT(HvdExtWhole)
HVD_EXT_FIELD(const char* const*, names)
HVD_EXT_FIELD(const HvdExtPart*, parts)
HVD_EXT_END(HvdExtWhole)
"""


def test_structs_have_the_fields_of_the_list_in_its_order():
    part, whole = spec.parse(TEXT).values()
    assert part._fields_ == [("number", ctypes.c_int32)]
    made = whole(parts=(part * 2)(part(3), part(5)), names=(ctypes.c_char_p * 1)(b"a"))
    assert [made.parts[place].number for place in range(2)] == [3, 5]
    assert made.names[0] == b"a"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("int32_t, number", "int128_t, number", r"the type of 'number' \(int128_t\) is not known"),
        ("const HvdExtPart*", "const HvdExtWhole*", r"the type of 'parts' \(const HvdExtWhole\*\) is not known"),
        ("HVD_EXT_STRUCT(HvdExtWhole)\n", "", "'const char\\* const\\*, names' must be in a struct"),
    ],
)
def test_a_list_that_cannot_be_read_says_why(before: str, after: str, words: str):
    with pytest.raises(NativeLibraryError, match=words):
        spec.parse(TEXT.replace(before, after))


def test_functions_have_the_types_of_the_header():
    header = """
int hvd_ext_a(int64_t channel, const char* name, void (*call)(int64_t a, int64_t b), const void* const* from,
              int64_t values[4]);  // a comment (1);
void hvd_ext_b(void (*call)(int64_t a));
const char* hvd_ext_c(const HvdExtPart* part, float* x);
"""
    i64, pointer = ctypes.c_int64, ctypes.POINTER
    structs = spec.parse(TEXT)
    assert spec.signatures(header, structs) == {
        "hvd_ext_a": (ctypes.c_int, [i64, ctypes.c_char_p, spec.AT_STEP, pointer(ctypes.c_void_p), pointer(i64)]),
        "hvd_ext_b": (None, [spec.ON_STOPPED]),
        "hvd_ext_c": (ctypes.c_char_p, [pointer(structs["HvdExtPart"]), pointer(ctypes.c_float)]),
    }
    with pytest.raises(NativeLibraryError, match=r"the type of 'hvd_ext_d' \(int128_t\) is not known"):
        spec.signatures("int hvd_ext_d(int128_t x);", structs)
