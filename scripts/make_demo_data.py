#!/usr/bin/env python
"""Make the demo data: train.jsonl, test.jsonl, images/ and processor/ in one folder."""

import argparse
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from digits.make import make_demo_data
    from digits.sounds import make_sound_data

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--train", type=int, default=12000, help="training samples (12000)")
    parser.add_argument("--test", type=int, default=500, help="held-out samples (500)")
    parser.add_argument("--seed", type=int, default=1234, help="same seed, same data (1234)")
    parser.add_argument(
        "--variants",
        type=int,
        default=1,
        help="of each training scan: as it is, and turned and moved a little (1)",
    )
    parser.add_argument(
        "--new-questions",
        action="store_true",
        help="another kind of question, in new_train.jsonl and new_test.jsonl",
    )
    parser.add_argument(
        "--sounds",
        type=int,
        metavar="N",
        help="as well, so many training samples with spoken digits, and as many of both kinds",
    )
    arguments = parser.parse_args()
    try:
        make_demo_data(
            arguments.out,
            train=arguments.train,
            test=arguments.test,
            seed=arguments.seed,
            variants=arguments.variants,
            new_questions=arguments.new_questions,
        )
        if arguments.sounds is not None:
            make_sound_data(
                arguments.out, train=arguments.sounds, test=arguments.test, seed=arguments.seed
            )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
