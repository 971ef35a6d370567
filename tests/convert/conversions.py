"""Conversions on ranks of their own, and the layouts that their tests share."""

from collections.abc import Callable
from typing import Any

from ranks import run_ranks

from loongplug.convert.rank import convert

MODEL = ("--model-name", "qwen3_vl_tiny", "--device", "cpu")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")


def converted(rank: int, *, flags: list[str]) -> None:
    convert(flags)


def convert_on(ranks: int, *flags: str, by: Callable[..., Any] = converted) -> list[Any]:
    """What each rank says of a conversion with these flags; ``by`` runs it."""
    return run_ranks(by, ranks, flags=list(flags), timeout=120.0)
