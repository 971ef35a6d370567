"""Options that several commands have, and what becomes of a user's errors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loongplug.data.data_options import MAX_ROW_MIB
from loongplug.output_files import Kind, check_output, figures

Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Phase = Annotated[Literal["pretrain", "sft"], typer.Option(help="What the rows are for.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Ranks = Annotated[int, typer.Option(help="Processes on this machine.")]
Warmup = Annotated[int, typer.Option(min=1, help="Steps before the measured ones.")]
Steps = Annotated[int, typer.Option(min=1, help="Measured steps.")]
# Of commands that hand on what is not an option of theirs.
HANDS_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["-h", "--help"],  # else -h would be handed on
}


@contextmanager
def user_errors(
    json_path: Path | None = None,
    kind: Kind = "metrics",
    *,
    words: Iterable[str] = (),
    flags: Sequence[str] = (),
    code: int = 1,
) -> Iterator[None]:
    """A ValueError is the user's: one sentence, and the exit code.

    Also of what is at ``json_path``, and of the training ``flags`` that a command takes.
    """
    try:
        check_output(json_path, figures(kind), inputs=[*words, *flags])
        if flags:
            from loongplug.training.launch import check_before_torch

            check_before_torch(flags)
        yield
    except ValueError as error:
        typer.echo(f"loongplug: error: {error}", err=True)
        raise typer.Exit(code) from None


def of_rows(
    *,
    media_root: Annotated[
        str | None,
        typer.Option(help="Relative paths of media start here. Default: the data file's folder."),
    ] = None,
    confine_media: Annotated[
        bool, typer.Option("--confine-media", help="Refuse media outside of that folder.")
    ] = False,
    min_pixels: Annotated[
        int | None, typer.Option(help="The least pixels of each image. Default: the folder's.")
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(help="The most pixels of each image. Default: the folder's.")
    ] = None,
    video_min_pixels: Annotated[
        int | None,
        typer.Option(help="The least pixels of each video, counted as its processor counts."),
    ] = None,
    video_max_pixels: Annotated[
        int | None,
        typer.Option(help="The most pixels of each video, counted as its processor counts."),
    ] = None,
    max_row_mib: Annotated[
        int, typer.Option(min=1, help="A larger row is a bad sample.")
    ] = MAX_ROW_MIB,
    special_tokens_in_text: Annotated[
        bool,
        typer.Option(
            "--special-tokens-in-text",
            help="Read special tokens in the text of rows as special tokens.",
        ),
    ] = False,
    ignore_keys: Annotated[
        str, typer.Option(metavar="KEY,...", help="Keys to count, not to refuse.")
    ] = "",
    columns: Annotated[
        str,
        typer.Option(metavar="OURS=THEIRS,...", help="Our names for rows' keys: query=question."),
    ] = "",
) -> None:
    """The options of all commands that read rows."""


def with_options(*others: Callable[..., None]) -> Callable[[Callable[..., None]], Any]:
    """A command with the options of ``others``, which it takes by keywords, beside its own."""

    def decorate(command: Callable[..., None]) -> Any:
        named = {**signature(command).parameters}
        for each in others:
            named = {**signature(each).parameters, **named}
        named.pop("options")
        own = sorted(named.values(), key=lambda each: each.kind)
        command.__signature__ = Signature(own)  # type: ignore[attr-defined]
        return command

    return decorate
