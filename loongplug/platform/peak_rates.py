"""What GPUs can do at most, by the names that torch gives them."""

# Dense bf16 products of matrices by the data sheets, in TFLOP/s. The first name that is contained
# in a device's counts, so that the more special ones stand first.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 836.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(device: str) -> float | None:
    """The peak of a device of this name; None for one that is not known.

    >>> peak_tflops("NVIDIA H100 80GB HBM3")
    989.0
    """
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
