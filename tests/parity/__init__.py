"""The parity matrix: layouts, modes and savings against their single ranks. Not in the wheel."""
