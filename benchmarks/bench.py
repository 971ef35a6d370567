"""Measure single parts, for those who work on them: ``python benchmarks/bench.py NAME``."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from modes import CONTEXT, LEVELS, are_cases

from loongplug.commands.options import (
    HANDS_ON,
    Device,
    Json,
    Phase,
    Ranks,
    Steps,
    Warmup,
    user_errors,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # the demo's rows

Rounds = Annotated[int, typer.Option(help="How often each side is measured.")]

bench = typer.Typer(help="Measure single parts on this machine.", no_args_is_help=True)


@bench.command("trace", context_settings=HANDS_ON)
def bench_trace(
    context: typer.Context,
    ranks: Ranks = 1,
    warmup: Warmup = 3,
    steps: Steps = 10,
    rounds: Rounds = 3,
    json_path: Json = None,
) -> None:
    """Measure what --trace costs a training run, given by train.py's own flags."""
    with user_errors():
        from micro.trace import bench_trace as run

        run(
            context.args,
            ranks=ranks,
            warmup=warmup,
            steps=steps,
            rounds=rounds,
            json_path=json_path,
        )


@bench.command("attention")
def bench_attention(
    sequence_length: Annotated[int, typer.Option(help="Tokens.")] = 2048,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 64,
    rounds: Rounds = 9,
    threads: Annotated[int | None, typer.Option(help="Threads; else all cores.")] = None,
    json_path: Json = None,
) -> None:
    """Measure LoongPlug's attention against Megatron's unfused one on the CPU."""
    with user_errors():
        from micro.attention import run

        run(
            sequence_length=sequence_length,
            heads=heads,
            head_dim=head_dim,
            rounds=rounds,
            threads=threads,
            json_path=json_path,
        )


@bench.command("pixels")
def bench_pixels(
    height: Annotated[int, typer.Option(help="Of an image.", min=32)] = 960,
    width: Annotated[int, typer.Option(help="Of an image.", min=32)] = 1280,
    rounds: Rounds = 15,
    json_path: Json = None,
) -> None:
    """Measure an image's way to its values, by transformers alone and as bytes."""
    with user_errors():
        from micro.pixels import run

        run(height=height, width=width, rounds=rounds, json_path=json_path)


@bench.command("joined")
def bench_joined(
    units: Annotated[int, typer.Option(help="Microbatches with media.", min=1)] = 8,
    side: Annotated[int, typer.Option(help="Patches along an image's side, even.", min=2)] = 8,
    rounds: Rounds = 20,
    json_path: Json = None,
) -> None:
    """Measure small units encoded one by one and joined to one pass, on one CPU rank."""
    with user_errors():
        from micro.joined import run

        run(units=units, side=side, rounds=rounds, json_path=json_path)


@bench.command("experts", context_settings=HANDS_ON)
def bench_experts(context: typer.Context, steps: Steps = 30, json_path: Json = None) -> None:
    """Measure steps of a tiny model with experts one by one and grouped, on two CPU ranks.

    Everything that is no option of this command goes to the run, such as its layout.
    """
    with user_errors():
        from micro.experts import run

        run(flags=context.args, steps=steps, json_path=json_path)


@bench.command("switch")
def bench_switch(
    switches: Annotated[int, typer.Option(help="Measured calls.")] = 20_000,
    json_path: Json = None,
) -> None:
    """Measure what a switch between parallel states costs."""
    with user_errors():
        from micro.switch import run

        run(switches=switches, json_path=json_path)


@bench.command("packing")
def bench_packing(
    samples: Annotated[int, typer.Option(help="Samples of the length mix.", min=1)] = 100_000,
    seq_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 8192,
    look_ahead: Annotated[int, typer.Option(help="As --packing-look-ahead.", min=1)] = 256,
    json_path: Json = None,
) -> None:
    """Measure the time that packing takes to plan, and how full its sequences are."""
    with user_errors():
        from micro.packing import run

        run(samples=samples, seq_length=seq_length, look_ahead=look_ahead, json_path=json_path)


@bench.command("data")
def bench_data(
    files: Annotated[
        list[str] | None, typer.Argument(help="As for --data-path; else the demo's rows.")
    ] = None,
    tokenizer_model: Annotated[
        Path | None, typer.Option(help="The folder of the model's tokenizer and processors.")
    ] = None,
    training_phase: Phase = "sft",
    samples: Annotated[int, typer.Option(help="Samples of a round.", min=1)] = 10_000,
    rounds: Annotated[int, typer.Option(help="How often all are made.", min=1)] = 5,
    json_path: Json = None,
) -> None:
    """Measure how many samples a second one worker makes the text of, by headers of media only."""
    with user_errors():
        from micro.data import run

        run(
            files=files or (),
            tokenizer_model=tokenizer_model,
            training_phase=training_phase,
            samples=samples,
            rounds=rounds,
            json_path=json_path,
        )


@bench.command("indexed")
def bench_indexed(
    samples: Annotated[int, typer.Option(help="The demo's rows, an epoch.", min=1)] = 4_000,
    dp_size: Annotated[int, typer.Option(help="Data parallel ranks.", min=1)] = 2,
    seq_length: Annotated[int, typer.Option(help="Tokens of a pack.")] = 1024,
    rounds: Rounds = 5,
    json_path: Json = None,
) -> None:
    """Measure what text costs one rank with packing, with an index of lengths and without."""
    with user_errors():
        from micro.indexed import run

        run(
            samples=samples,
            dp_size=dp_size,
            seq_length=seq_length,
            rounds=rounds,
            json_path=json_path,
        )


@bench.command("convert", context_settings=HANDS_ON)
def bench_convert(
    context: typer.Context,
    model_name: Annotated[
        str, typer.Option(help="The model to make random weights of.")
    ] = "qwen3_vl_2b",
    ranks: Ranks = 1,
    rounds: Rounds = 3,
    where: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; else the temporary one.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Measure loongplug convert, both ways, against a plain copy, and its memory.

    Everything that is no option of this command goes to the conversion: its layout.
    """
    with user_errors():
        from micro.convert import bench_convert as run

        run(
            model_name=model_name,
            layout=context.args,
            ranks=ranks,
            rounds=rounds,
            where=where,
            json_path=json_path,
        )


@bench.command("memory")
def bench_memory(
    layers: Annotated[int, typer.Option(help="Of the decoder.")] = 16,
    seq_length: Annotated[int, typer.Option(help="Tokens of a microbatch.")] = 512,
    stages: Annotated[
        int, typer.Option(help="Pipeline stages, of two virtual ones each; 1: no pipeline.")
    ] = 1,
    device: Device = "auto",
    json_path: Json = None,
) -> None:
    """Measure what a decoder with experts holds with each way to hold less: overlap included.

    Ends with exit code 1 when the losses of two ways differ in a bit.
    """
    with user_errors():
        from micro.memory import bench_memory as run

        raise typer.Exit(
            run(
                layers=layers,
                seq_length=seq_length,
                stages=stages,
                device=device,
                json_path=json_path,
            )
        )


@bench.command("pipeline-tables")
def bench_pipeline_tables(
    table: Annotated[str, typer.Argument(help="modes, published or figure-4a.")],
    steps: Steps = 3,
    json_path: Json = None,
) -> None:
    """Make a table of modes or of published schedules, with stages that sleep."""
    with user_errors():
        from loongplug.verify.forked_runs import preload

        preload("cpu")  # what is below brings Megatron
        from micro.pipeline_tables import TABLES

        if table not in TABLES:
            raise ValueError(f"{table}: expected one of {', '.join(TABLES)}.")
        TABLES[table](steps=steps, json_path=json_path)


@bench.command("levels")
def bench_levels(
    rounds: Annotated[int, typer.Option(help="How often each level is measured.")] = 3,
    pictures: Annotated[
        Path, typer.Option(help="A folder for a picture of one step of each level.")
    ] = Path("runs/bench/levels"),
    json_path: Json = None,
) -> None:
    """Measure the modes of heterogeneous parallelism side by side on the CPU."""
    with user_errors(json_path, LEVELS):
        from modes.levels import bench_levels as run

        run(rounds=rounds, json_path=json_path, pictures=pictures)


@bench.command("context")
def bench_context(
    rounds: Annotated[int, typer.Option(help="How often each side is measured.")] = 3,
    json_path: Json = None,
) -> None:
    """Measure context parallelism on two CPU ranks, a core each, beside what it is held against."""
    with user_errors(json_path, CONTEXT):
        from modes.context import bench_context as run

        run(rounds=rounds, json_path=json_path)


@bench.command("pipeline")
def bench_pipeline(
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="uniform, encoder_hetero_dp, full_hetero_dp or own_ranks. Default: all of these. "
            "Also streamed: full separation, one encoder in the pipeline's bubbles."
        ),
    ] = None,
    decoder: Annotated[
        str,
        typer.Option(help="Milliseconds of a stage: 10/20, or with one for each stage 10/20,5/10."),
    ] = "20/40",
    encoder: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=10/20, on one rank; NAME=10/20x2p3: two replicas of three stages on ranks "
            "of its own. Repeat it for more. Default: encoder=20/40."
        ),
    ] = None,
    pp: Annotated[int, typer.Option(help="The decoder's pipeline stages.")] = 2,
    tp: Annotated[int, typer.Option(help="Ranks of each of them.")] = 1,
    virtual_stages: Annotated[int, typer.Option(help="Of each rank.")] = 1,
    microbatches: Annotated[int, typer.Option(help="Of a step.")] = 8,
    steps: Steps = 3,
    pictures: Annotated[
        Path | None, typer.Option(help="Also draw a step of each mode into this folder.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Run modes with stages that sleep: the time of a step, the bubble of each rank, a picture.

    The schedules, policies and exchanges are those of a run; only the model is not there.
    """
    with user_errors(json_path, are_cases):
        from modes.pipeline import bench_pipeline as run

        run(
            modes=mode or (),
            decoder=decoder,
            encoders=encoder or ("encoder=20/40",),
            pp=pp,
            tp=tp,
            chunks=virtual_stages,
            microbatches=microbatches,
            steps=steps,
            json_path=json_path,
            pictures=pictures,
        )


if __name__ == "__main__":
    bench()
