"""What ``--save`` and ``--save-lora`` wrote, as a Hugging Face folder for a while."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from loongplug.checkpoint.checkpoint_files import TRACKER
from loongplug.checkpoint.settings_notes import (
    ARCHITECTURE_FILE,
    CARRIED_FOLDER,
    for_any_layout,
    read_architecture,
)
from loongplug.convert.worker import convert
from loongplug.models.lora.peft_config import ADAPTER_CONFIG_FILE, read_peft_config


@contextmanager
def as_hf_folder(
    model: Path,
    *,
    base: Path | None = None,
    tokenizer_model: Path | None = None,
    trusted_packages: Sequence[str] = (),
) -> Iterator[Path]:
    """The Hugging Face folder of ``model``: itself, or an export of a checkpoint or of adapters.

    The export has adapters merged and goes when the context ends. ``tokenizer_model`` is for
    checkpoints, which need not have a tokenizer; ``base`` is what adapters are for, else the folder
    that their config names.
    """
    flags = _flags(model, base=base, tokenizer_model=tokenizer_model)
    if flags is None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="loongplug-eval-") as scratch:
        config, target = Path(scratch) / "model.yaml", Path(scratch) / "hf"
        config.write_text(OmegaConf.to_yaml(OmegaConf.create(for_any_layout(_architecture(model)))))
        flags += ["--config-file", str(config), "--save-hf", str(target)]
        if trusted_packages:
            flags += ["--trusted-packages", *trusted_packages]
        convert(flags, ranks=1)
        yield target


def _flags(model: Path, *, base: Path | None, tokenizer_model: Path | None) -> list[str] | None:
    """What ``loongplug convert`` is to read; None for a folder that needs no conversion."""
    if (model / TRACKER).is_file():
        _require_none("--base", base, model=model, kind="a checkpoint")
        given = ["--tokenizer-model", str(tokenizer_model)] if tokenizer_model else []
        if not given and not (model / CARRIED_FOLDER).is_dir():
            raise ValueError(
                f"The checkpoint {model} has no tokenizer: give --tokenizer-model DIR, the one"
                " that it was trained with."
            )
        return ["--load", str(model), *given]
    _require_none("--tokenizer-model", tokenizer_model, model=model, kind="not a checkpoint")
    if (model / ADAPTER_CONFIG_FILE).is_file():
        return ["--load-lora", str(model), "--load-hf", str(base or _named_base(model))]
    _require_none("--base", base, model=model, kind="not a folder of adapters")
    return None


def _require_none(flag: str, value: Path | None, *, model: Path, kind: str) -> None:
    if value is not None:
        raise ValueError(f"{flag} {value} is given, but {model} is {kind}: leave the flag out.")


def _named_base(adapters: Path) -> Path:
    named = read_peft_config(adapters).get("base_model_name_or_path")
    if not isinstance(named, str) or not Path(named).is_dir():
        raise ValueError(
            f"The adapters in {adapters} are for the model {named!r:.200}, which is not a folder"
            " here: give the model's with --base DIR."
        )
    return Path(named)


def _architecture(model: Path) -> dict[str, Any]:
    found = read_architecture(model)
    if found is None:
        raise ValueError(
            f"{model} has no {ARCHITECTURE_FILE}, which says what model it has: export it with"
            " loongplug convert --model-name NAME --save-hf DIR, and evaluate DIR."
        )
    return found
