# SPDX-License-Identifier: Apache-2.0
"""Our declarations of XLA's FFI (_xla_ffi.py) beside the header of the jaxlib that is installed."""
import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tessera import _abi, _xla_ffi

jax = pytest.importorskip("jax")

HEADER = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
# Each of our structs, and XLA's. The fields have other names, but the same order.
STRUCTS = {"_Extension": "Extension_Base", "_Version": "Api_Version", "_Metadata": "Metadata",
           "_MetadataExtension": "Metadata_Extension", "_Api": "Api", "_Buffer": "Buffer", "_Buffers": "Args",
           "_ByteSpan": "ByteSpan", "_Attributes": "Attrs", "_Frame": "CallFrame", "_ErrorCreate": "Error_Create_Args",
           "_ErrorMessage": "Error_GetMessage_Args", "_StreamGet": "Stream_Get_Args",
           "_Allocate": "DeviceMemory_Allocate_Args", "_Free": "DeviceMemory_Free_Args",
           "_OrdinalGet": "DeviceOrdinal_Get_Args"}
TYPES = {"PRED": _abi.U8, "S32": _abi.I32, "S64": _abi.I64, "U8": _abi.U8, "U32": _abi.I32, "F16": _abi.F16,
         "F32": _abi.F32, "F64": _abi.F64, "BF16": _abi.BF16, "S8": _abi.I8,
         "F8E4M3FN": _abi.E4M3}
CONSTANTS = {"XLA_FFI_Extension_Metadata": "_METADATA", "XLA_FFI_ExecutionStage_EXECUTE": "_EXECUTE",
             "XLA_FFI_Error_Code_INVALID_ARGUMENT": "_INVALID_ARGUMENT", "XLA_FFI_Error_Code_INTERNAL": "_INTERNAL"}


def header():
    if not HEADER.exists():
        pytest.skip("this jaxlib ships no header of its FFI")
    return re.sub(r"//[^\n]*", "", HEADER.read_text(encoding="utf-8"))


def test_version_is_known():
    """A newer minor version only adds fields, so XLA takes handlers of older ones for a while; then it would refuse
    ours when tessera.jax is imported."""
    text = header()
    major, minor = (int(re.search(rf"#define XLA_FFI_API_{what} (\d+)", text)[1]) for what in ("MAJOR", "MINOR"))
    assert major == _xla_ffi.MAJOR, (
        f"XLA's FFI is {major}.{minor}, of another major version than {_xla_ffi.MAJOR}: declare its structs in "
        "python/tessera/_xla_ffi.py anew, and tell it the version that the runtime has")
    assert minor in _xla_ffi.MINORS, (
        f"XLA's FFI is {major}.{minor}, newer than {_xla_ffi.MINORS[-1]}, which _xla_ffi.py knows. If the other tests "
        f"of this file and test_jax.py pass, add {minor} to MINORS there and to the docstring; if not, mend the structs "
        "that they name first")


def fields(text, name):
    body = re.search(rf"struct XLA_FFI_{name} \{{(.*?)\n\}}", text, re.S)[1]
    body = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"\1 \1", body)
    return re.findall(r"(\w+)\s*;", body)


def test_structs_are_the_headers(tmp_path):
    compiler = shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    text = header()
    lines, expected = [], {}
    for ours, theirs in STRUCTS.items():
        struct, names = getattr(_xla_ffi, ours), fields(text, theirs)
        assert len(names) >= len(struct._fields_) - (ours == "_ErrorMessage"), (ours, names)
        for field, name in zip(struct._fields_, names):
            expected[f"{theirs}.{name}"] = getattr(struct, field[0]).offset
            lines.append(f'std::printf("{theirs}.{name} %zu\\n", offsetof(XLA_FFI_{theirs}, {name}));')
    for name, value in TYPES.items():
        lines.append(f'std::printf("type.{name} %d\\n", XLA_FFI_DataType_{name});')
    for name in CONSTANTS:
        lines.append(f'std::printf("{name} %d\\n", {name});')
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    includes = f'#include <cstddef>\n#include <cstdio>\n#include "{HEADER}"\n'
    source.write_text(includes + f"int main() {{ {' '.join(lines)} }}\n", encoding="utf-8")
    subprocess.run([compiler, "-std=c++17", "-w", str(source), "-o", str(program)], check=True)
    told = dict(line.split() for line in subprocess.check_output([program], text=True).splitlines())
    assert len(expected) > 60
    for name, offset in expected.items():
        assert int(told[name]) == offset, f"{name} lies at {told[name]}, not at {offset}: see _xla_ffi.py"
    for name, code in TYPES.items():
        assert _xla_ffi.TYPES[int(told[f"type.{name}"])] == code
    assert len(TYPES) == len(_xla_ffi.TYPES)
    for name, ours in CONSTANTS.items():
        assert int(told[name]) == getattr(_xla_ffi, ours), name


def test_struct_sizes_are_told():
    """XLA reads as far as struct_size says."""
    assert ctypes.sizeof(_xla_ffi._StreamGet) == 32 and ctypes.sizeof(_xla_ffi._Allocate) == 48
