"""Kernels in a process that was forked: before its parent ran any, after, and while another thread runs one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ops.cpu.common import needs_library

pytestmark = [needs_library, pytest.mark.skipif(sys.platform != "linux", reason="os.fork() beside threads, on Linux")]

LIMIT = 60  # seconds; it takes two

# A child may not use torch's own threads, which the fork has left behind: it calls the C function on tensors that its
# parent has made, with two threads of the kernels' own.
PROGRAM = """
import ctypes, os, signal, threading
import torch
from dla.ops.cpu.binding import NUMBERED, _function
from dla.ops.cpu.ground import DecodeArgs
from dla.ops.cpu.library import library

torch.set_num_threads(2)
N, H, dk, dv = 4, 4, 1024, 96  # more than one thread is worth
torch.manual_seed(0)
x = {"q": torch.randn(N, H, dk), "k": torch.randn(N, H, dk), "v": torch.randn(N, H, dv)}
x |= {"matrices": torch.zeros(N, H, dk, dv), "length": torch.zeros(N, dtype=torch.int64), "o": torch.zeros(N, H, dv)}
arguments, others = (
    DecodeArgs(memory=NUMBERED.index("single"), sequences=N, heads=H, key_heads=H, dk=dk, dv=dv, threads=2, states=1,
               scale=1.0) for _ in range(2)
)
y = {name: tensor.clone() for name, tensor in x.items()}
arguments.point(x), others.point(y)
run, size = _function(library(), "dla_decode"), N * H * dv * 4
expected = ((x["q"] * x["k"]).sum(-1, keepdim=True) * x["v"])


def outputs():  # of a first token, without a call of torch
    ctypes.memset(arguments.matrices, 0, N * H * dk * dv * 4)
    ctypes.memset(arguments.o, 255, size)
    assert run(ctypes.byref(arguments)) == 0
    return ctypes.string_at(arguments.o, size)


def in_child(deeper=0):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        torch.set_num_threads(1)
        try:
            for _ in range(5):
                found = outputs()
                assert found == outputs()
            if deeper:
                assert in_child(deeper - 1) == found
            os.write(to, found)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child failed"
    return os.read(back, size)


back, to = os.pipe()  # which holds what a child writes (24 KiB) before it is read
before = in_child()  # there are no threads yet
ours = outputs()
assert torch.frombuffer(bytearray(ours), dtype=torch.float32).view(N, H, dv).allclose(expected, rtol=1e-4, atol=1e-4)
assert before == ours, "the child forked first has other numbers"
for _ in range(3):
    assert in_child() == ours, "a child forked beside threads has other numbers"
    assert outputs() == ours, "the parent has other numbers after it forked"
assert in_child(deeper=1) == ours, "a child of a child has other numbers"
going = True


def go_on():
    while going:
        run(ctypes.byref(others))


busy = threading.Thread(target=go_on)
busy.start()
try:
    for _ in range(10):
        assert in_child() == ours, "a child forked during a call of another thread has other numbers"
finally:
    going = False
    busy.join()
print("fine")
"""


def test_a_forked_process_computes_the_same() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT)
    assert (ran.returncode, ran.stdout.strip()) == (0, "fine"), ran.stderr
