"""The pages in ``docs`` that are made from the code, beside those of the parity matrix."""
