"""The CPU platform in a process that starts without it: slower, because it imports torch again."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TORCH_AS_BEFORE = """
import os, torch
import torch._dynamo.config  # wraps torch.manual_seed when it is imported

def picture():
    owners = (torch, torch.cuda, torch.cuda.random, torch.Tensor)
    return {(o.__name__, n): id(v) for o in owners for n, v in vars(o).items()}

before = picture()
from loongplug.platform import activate
platform = activate("cpu")
assert picture() != before
assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
assert torch._dynamo.config.disable
with torch.device("meta"):  # the first use of a device context
    assert torch.zeros(2).device.type == "meta"
import torch.utils.cpp_extension
platform.deactivate()
after = picture()
assert {key: after[key] for key in before} == before
assert "cuda" not in vars(torch.Tensor) and "type" not in vars(torch.Tensor)
assert "TORCHDYNAMO_DISABLE" not in os.environ
assert not torch._dynamo.config.disable
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
"""


FEW_KERNELS = """
import ctypes, torch
from loongplug.platform import activate

class Used(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefgxyz"]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Used
activate("cpu")
from loongplug.models.layers import linear
used = []
for start in (1000, 1200, 1400):
    for rows in range(start, start + 200):
        linear.fast_mm(torch.ones(rows, 64), torch.ones(64, 72))
    used.append(libc.mallinfo2().x >> 10)
grown = used[2] - used[1]  # KiB; each kernel has some 280, and would be kept twice
assert linear._KERNEL is None or grown < 200 * 50, used
"""


def test_torch_is_as_before_after_deactivation() -> None:
    _in_fresh_process(TORCH_AS_BEFORE)


def test_rows_that_vary_leave_few_kernels_in_memory() -> None:
    _in_fresh_process(FEW_KERNELS)


def _in_fresh_process(code: str) -> None:
    left_out = ("TORCHDYNAMO_DISABLE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment["CUDA_HOME"] = str(Path(__file__).parent)  # of which torch would complain
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
