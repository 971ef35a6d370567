"""``loongplug partition``: from the flags of a run to a split of its layers into stages."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from loongplug.estimate.run_of_flags import quiet
from loongplug.output_files import write_figures


def partition(
    flags: Sequence[str],
    *,
    ranks: int,
    visual_tokens: int | None = None,
    encoder_stages: Sequence[str] = (),
    json_path: Path | None = None,
) -> None:
    """Run the command.

    ``encoder_stages`` are NAME=N: encoders that have stages of their own, before the decoder's,
    on ranks that are not among ``ranks``. ``visual_tokens`` of each sample stand in for the images
    of the data; the flags need name neither data nor tokenizer then.

    Raises:
        ValueError: the flags or the options cannot be used, or there is nothing to split.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}: expected how many the run will have, 1 or more")
    with (
        Console(stderr=True).status("counting the work of each layer"),
        quiet(),
        TemporaryDirectory(prefix="loongplug-partition-") as folder,
    ):
        # Here, since these bring Megatron, which takes seconds.
        from loongplug.partition.splits import find
        from loongplug.partition.tables import as_json, print_found

        found = find(
            flags,
            ranks=ranks,
            visual_tokens=visual_tokens,
            encoder_stages=encoder_stages,
            folder=Path(folder),
        )
    print_found(found)
    write_figures(json_path, as_json(found), "partition")
