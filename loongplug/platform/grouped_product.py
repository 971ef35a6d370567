"""What torch's product of several matrices at once (``grouped_mm``) asks for."""

ALIGNMENT = 8  # bf16 values in the 16 bytes that a row of each operand is a multiple of
CAPABILITY = (8, 0)  # of the first GPUs with such a kernel
TORCH = "2.10"  # the first one with it
