"""LoRA: what a module's YAML says of its adapters. In this folder are the adapters beside parallel
linears, and their names in ``peft``.

Nothing here reads or writes files (that is ``loongplug.checkpoint``) or knows of training's flags.
"""

from dataclasses import dataclass
from typing import Any

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters of one module: ``W x`` becomes ``W x + alpha / rank * B A dropout(x)``.

    ``target_modules`` are names of linears, or the last parts of their paths in the module
    (``self_attention.linear_proj``); those of experts are meant too. Everything else in the module
    is frozen.
    """

    rank: int
    alpha: float | None = None  # None: the rank, so that the product counts as it is
    dropout: float = 0.0
    target_modules: tuple[str, ...] = LINEARS

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def targets(self, path: str) -> bool:
        """Whether the linear at ``path`` (with dots) has an adapter."""
        return path.rpartition(".")[2] in LINEARS and any(
            path == target or path.endswith(f".{target}") for target in self.target_modules
        )


def adapts_experts(model: Any) -> bool:
    """Whether the experts of a model's config, if it has any, have adapters."""
    settings: LoraSettings | None = getattr(getattr(model, "foundation", None), "lora", None)
    return settings is not None and any(
        settings.targets(f"mlp.experts.{linear}") for linear in ("linear_fc1", "linear_fc2")
    )
