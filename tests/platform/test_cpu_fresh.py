"""The CPU platform in a process that starts without it: slower, because it imports torch again."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CODE = """
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


def test_torch_is_as_before_after_deactivation() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    environment["CUDA_HOME"] = str(Path(__file__).parent)  # of which torch would complain
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
