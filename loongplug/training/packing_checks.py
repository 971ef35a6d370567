"""The checks behind the start-up rules about packing.

They follow the contract of :mod:`loongplug.training.checks`, and answer None without packing.
"""

from argparse import Namespace
from typing import Any


def one_row(args: Namespace, model: Any) -> str | None:
    """A microbatch is one pack."""
    if not args.packing or args.micro_batch_size in (None, 1):
        return None
    return f"--packing with --micro-batch-size {args.micro_batch_size}"


def balancing_by_sample(args: Namespace, model: Any) -> str | None:
    """No loss balances experts sample by sample, which a pack's samples are not kept apart for."""
    kinds = args.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not args.packing or not args.num_experts or "seq_aux_loss" not in kinds:
        return None
    return "--packing with --moe-router-load-balancing-type seq_aux_loss"
