"""Tokens/s where media load slowly, of two checkouts in turn: ``python slow_media.py OLD NEW``.

Whoever decodes an image sleeps first, and so does each layer before its forward, so that cores
decide little. Layouts and samples are those of the levels (``bench.py levels``), every rank has one
background process, and both sides have an index. Runs follow each other, as background processes
would load in the other side's turn. Few steps flatter, as the start of a run has loaded ahead.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

# A side: one run, whose steps' seconds, tokens and losses it writes to a file.
_SIDE = """
import json, os, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path

from loongplug.data import media_files


def behind_a_sleep(work, milliseconds):
    def slowly(*args, **options):
        time.sleep(milliseconds / 1e3)
        return work(*args, **options)

    return slowly


load, layer = map(float, sys.argv[5:7])
# Before others take it from there.
media_files.decode_image = behind_a_sleep(media_files.decode_image, load)
from loongplug.verify.ranks import join, run_ranks
from loongplug.verify.forked_runs import preload
from modes.levels_work import SETTINGS, Work, level_variants, write_levels_data

folder, layout, level, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
work = replace(Work(), decoder_layers=4, encoder_layers=2, encoder_size=32, steps=steps)
(setting,) = (each for each in SETTINGS if each.name == layout)
variants = level_variants(level, work, setting)
flags = [*work.flags(folder), *setting.flags, *variants[len(variants) // 2], "--num-workers", "1"]


def train(rank, tell):
    join(rank, folder=folder, device="cpu", minutes=5.0)
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from loongplug.training.run import run

    TransformerLayer.forward = behind_a_sleep(TransformerLayer.forward, layer)
    found = [[each.seconds, each.tokens, each.loss] for each in run(flags)]
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(found[work.warmup:]))


write_levels_data(folder, samples=work.samples)
rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
for number, row in enumerate(rows):  # no image twice: a cache would keep it
    *media, _ = row["messages"][0]["content"]
    for place, each in enumerate(media):
        each["image"], shared = f"images/{number}-{place}.png", each["image"]
        os.link(folder / shared, folder / each["image"])
(folder / "train.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
from loongplug.cli import app
given = (folder / "train.jsonl", "--tokenizer-model", folder / "processor", "--processes", 1)
app(["data", "index", *map(str, given)], standalone_mode=False)
preload("cpu")
run_ranks(train, setting.ranks, folder=folder, timeout=900)
"""


def rate(checkout: Path, *words: object) -> float:
    """Tokens/s of one side's run, behind its first steps."""
    paths = os.pathsep.join((str(checkout), str(Path(__file__).parent)))
    with tempfile.TemporaryDirectory(prefix="loongplug-slow-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", _SIDE, folder, *map(str, words)],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{checkout}: {done.stdout[-4000:]}")
        found = json.loads((Path(folder) / "steps.json").read_text())
    seconds, tokens, losses = zip(*found, strict=True)
    print(f"  {checkout}: loss {losses[-1]:.6f}, {sum(seconds) / len(found):.3f} s a step")
    return float(sum(tokens) / sum(seconds))


def main() -> None:
    """Print the tokens/s of both sides and their ratio, of each round, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="that count, behind two")
    parser.add_argument("--load", type=float, default=9, help="milliseconds for each image")
    parser.add_argument("--layer", type=float, default=25, help="milliseconds for each layer")
    parser.add_argument("--layout", default="PP2")
    parser.add_argument("--level", default="streamed full separation")
    given, ratios = parser.parse_args(), []
    sides = [given.old.resolve(), given.new.resolve()]
    words = (given.layout, given.level, given.steps, given.load, given.layer)
    for number in range(given.rounds):
        turned = sides if number % 2 == 0 else sides[::-1]
        rates = {side: rate(side, *words) for side in turned}
        old, new = (rates[side] for side in sides)
        ratios.append(new / old)
        print(f"round {number + 1}: old {old:,.0f}, new {new:,.0f} tokens/s: {new / old:.2f}")
    print(f"median of {given.rounds} rounds: {median(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
