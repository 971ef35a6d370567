"""Peaks of GPUs by the names that torch gives them."""

import pytest

from loongplug.platform.peak_rates import peak_tflops

pytestmark = pytest.mark.quick


def test_the_name_decides():
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989.0
    assert peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA GB200") == 2500.0
    assert peak_tflops("NVIDIA B200") == 2250.0
    assert peak_tflops("NVIDIA GeForce RTX 4090") is None
