"""Large tensors on CPU are mapped anew, page by page, each time they are made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes
from launcher.memory import keep_freed_memory
keep_freed_memory()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
before = library.mallinfo2().hblkhd
block = bytearray(64 << 20)
print(library.mallinfo2().hblkhd - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
@pytest.mark.parametrize(("variables", "mapped"), [({}, False), ({"MALLOC_TRIM_THRESHOLD_": "100000"}, True)])
def test_large_blocks_come_from_the_heap_unless_the_user_says_otherwise(variables: dict[str, str], mapped: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run([sys.executable, "-c", CODE], env={**inherited, **variables}, capture_output=True, text=True, check=True)
    assert (int(ran.stdout) >= 64 << 20) is mapped
