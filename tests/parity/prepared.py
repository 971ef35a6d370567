"""What cells of the parity matrix share: a small model, its samples, processor and weights."""

import json
from collections.abc import Sequence
from pathlib import Path

from loongplug.data.sample_order import epoch_permutation
from loongplug.verify.plan import SAMPLES, SEED
from loongplug.verify.tiny_sizes import longest_row, up
from parity.cells import Cell, one_word

_DATA_SEED = 1234  # Megatron's default, which orders samples
_LARGEST = 4  # any size of the axes divides it


def length_of(model: str, *, divides: int) -> int:
    """Tokens of the longest sample, and no more than what makes them a multiple of ``divides``."""
    from loongplug.training.config import compose_model

    return up(longest_row(compose_model(model_name=model).config), divides)


def prepare(cell: Cell, folder: Path) -> None:
    """Write the cell's model as YAML, its rows, its processor and its weights."""
    from loongplug.models.hf_config import hf_config
    from loongplug.training.config import compose_model
    from loongplug.training.special_tokens import read_tokenizer, with_token_ids
    from loongplug.verify.tiny_rows import write_rows
    from loongplug.verify.tiny_sizes import (
        TinyLayout,
        as_overrides,
        media_of,
        tiny_sizes,
        write_processor_of,
    )
    from loongplug.verify.weights import write_random_weights

    folder.mkdir(parents=True)
    composed = compose_model(model_name=cell.model)
    rows = write_rows(folder / "data", samples=SAMPLES, media=media_of(composed.config))
    rows = kept_media(rows, cell)
    (folder / "rows").write_text(str(rows.relative_to(folder)), encoding="utf-8")
    write_processor_of(composed.config, folder / "processor")
    tokenizer = read_tokenizer(folder / "processor")
    largest = TinyLayout(tp=_LARGEST, ep=_LARGEST, etp=_LARGEST, encoder_tp=_LARGEST)
    sizes = tiny_sizes(composed.config, largest, vocabulary=tokenizer.size, tiny_media=True)
    composed = compose_model(model_name=cell.model, overrides=as_overrides(sizes | cell.sizes()))
    (folder / "model.yaml").write_text(
        "# @package _global_\n" + composed.to_yaml(), encoding="utf-8"
    )
    model = with_token_ids(
        composed.config, tokenizer, special_tokens=composed.family.special_tokens
    )
    described = composed.family.load_hugging_face(model)
    write_random_weights(folder / "weights", described, seed=SEED)
    hf_config(described).save_pretrained(folder / "weights")  # of overlapped cells' own runs


def kept_media(rows: Path, cell: Cell) -> Path:
    """Rows without the media that the cell leaves away, beside ``rows``, where the media are."""
    if cell.media == "all":
        return rows
    samples = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    order = epoch_permutation(len(samples), seed=_DATA_SEED, epoch=0)
    for place, number in enumerate(order):
        for message in samples[number]["messages"]:
            if not isinstance(message["content"], str):
                message["content"] = [
                    each
                    for each in message["content"]
                    if each["type"] == "text" or cell.keeps(each["type"], place=place)
                ]
    kept = rows.with_name(f"{rows.stem}-{one_word(cell.media)}-{cell.batch}.jsonl")
    lines = (json.dumps(each) + "\n" for each in samples)
    kept.write_text("".join(lines), encoding="utf-8")
    return kept


def prepare_adapters(flags: Sequence[str], prepared: Path, *, folder: Path) -> None:
    """Write random adapters for the prepared model, if ``flags`` give any of its modules some."""
    from loongplug.models.lora.mapping import adapter_table
    from loongplug.training.config import compose_model
    from loongplug.training.flags import read_command_line
    from loongplug.verify.weights import write_random_adapters

    folder.mkdir(parents=True)
    composed = compose_model(
        config_file=prepared / "model.yaml", overrides=read_command_line(flags).overrides
    )
    table = adapter_table(composed.config, composed.family.load_hugging_face(composed.config))
    if table is not None:
        write_random_adapters(folder / "lora", table, seed=SEED)
