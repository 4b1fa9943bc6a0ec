"""Calls of the CUDA driver, against a stub declared by NVIDIA's header: names, types, constants, errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

HERE = Path(__file__).parent
PROGRAM = """
import ctypes
import threading
from chitu.errors import TransferFailed
from chitu.ops.cuda_driver import CudaDriver

BASE, BYTES, SHIFT = 0x700000000000, 65536, 0x1000000
HOST = 0x7F0000000000  # above 32 bits, as addresses are

def fails(call, words):
    try:
        call()
    except TransferFailed as error:
        assert words in error.message, error.message
    else:
        raise AssertionError(words)

def use(driver):
    assert driver.is_device_memory(BASE + 100, BYTES - 100)
    assert not driver.is_device_memory(BASE + 100, BYTES) and not driver.is_device_memory(HOST, 1)
    assert driver.pin(HOST, 4096) == HOST + SHIFT
    assert not driver.is_device_memory(HOST, 1), "pinned memory is the host's"
    fails(lambda: driver.pin(HOST, 4096), "4096 bytes of host memory cannot be pinned (ulimit -l?): some error")
    driver.unpin(HOST)
    fails(lambda: driver.unpin(HOST), "cuMemHostUnregister")
    fails(lambda: driver.pin(HOST, BYTES + 1), "out of memory")
    exported = driver.export(BASE + 4096)
    assert exported == (bytes([7]) * 64, 4096, BYTES)
    fails(lambda: driver.export(HOST), "no device memory")
    address = driver.open(exported.handle)
    assert address == BASE + SHIFT
    host = ctypes.create_string_buffer(8)
    driver.copy_to_host(ctypes.addressof(host) + 1, address + 5, 6)
    assert host.raw == bytes([0, 5, 5, 5, 5, 5, 5, 0])
    fails(lambda: driver.copy_to_host(ctypes.addressof(host), address + BYTES - 4, 8), "cannot be copied")
    before = current()
    with CudaDriver(0).current():
        assert current() == 0x1000
    assert current() == before
    driver.close(address)
    fails(lambda: driver.open(bytes(64)), "cannot be mapped")
    fails(lambda: driver.open(b"short"), "5 bytes")
    used.append(True)

def current():
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value

used = []
driver = CudaDriver(1)
assert driver.uuid == "a1" * 16 and CudaDriver.of_uuid("a1" * 16).uuid == driver.uuid
assert CudaDriver.of_uuid("a0" * 16).uuid == "a0" * 16
fails(lambda: CudaDriver.of_uuid("a2" * 16), "none of the 2 GPUs that this process sees has the uuid a2")
use(driver)
thread = threading.Thread(target=use, args=[driver])  # whose current context is another
thread.start()
thread.join()
assert len(used) == 2
fails(lambda: CudaDriver(2), "cuDeviceGet")
print("ok")
"""


def test_every_call_has_the_arguments_that_the_header_wants(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="its wheel has the header")
    compiler = shutil.which("gcc") or shutil.which("cc")
    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    if compiler is None or not (header / "cuda.h").exists():
        pytest.skip("no compiler or no header")
    library = tmp_path / "libcuda.so.1"
    source = HERE / "libcuda_stub.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-I{header}", "-o", library, source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
