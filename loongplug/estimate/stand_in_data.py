"""A tokenizer and data that stand in for the run's own, where the flags tell the sizes."""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from loongplug.models.registry import Family
from loongplug.training.config import compose_asked_for
from loongplug.training.defaults import default_tokenizer
from loongplug.training.flags import read_command_line
from loongplug.training.special_tokens import FILE


def with_stand_ins(flags: Sequence[str], folder: Path) -> list[str]:
    """``flags`` with a tokenizer and an empty file of data in ``folder``, where they lack them.

    The tokenizer has the model's special tokens and no others.

    Raises:
        ValueError: the flags cannot be read, or the model cannot be composed.
    """
    line = read_command_line(flags)
    args, added = line.args, []
    if not args.data_path and not args.train_data_path:
        rows = folder / "rows.jsonl"
        rows.touch()  # a run's start looks whether it is there, an estimate reads nothing of it
        added += ["--train-data-path", str(rows)]
    default_tokenizer(args)
    if args.tokenizer_model is None:
        composed = compose_asked_for(args, overrides=line.overrides)
        _write_tokenizer(folder, composed.config, family=composed.family)
        added += ["--tokenizer-model", str(folder)]
    return [*flags, *added]


def _write_tokenizer(folder: Path, model: Any, *, family: Family) -> None:
    known = {text: getattr(model, field) for field, text in family.special_tokens.items()}
    free = (number for number in count() if number not in known.values())
    ids = {text: next(free) if number is None else number for text, number in known.items()}
    tokens = [{"content": text, "id": number} for text, number in ids.items()]
    content = {"added_tokens": tokens, "model": {"vocab": {}}}
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")
