"""What a model takes from its tokenizer: the ids of special tokens, and how many ids there are."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loongplug.data.folder_files import COMBINED_FILE, IMAGE_FILE, read_json

FILE = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """``size`` is one more than the highest id; ``ids`` holds the added tokens by their text."""

    size: int
    ids: Mapping[str, int]


def read_tokenizer(directory: Path) -> TokenizerFacts:
    """``tokenizer.json`` of a folder, without the tokenizer; ValueError where it is none."""
    file = directory / FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        vocabulary = content["model"]["vocab"]
    except OSError as error:
        raise ValueError(f"{directory} has no readable {FILE} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not a tokenizer of Hugging Face's format ({error!r})"
        ) from error
    # Unigram vocabularies are lists, whose positions are the ids.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return TokenizerFacts(size=max([-1, *ids, *added.values()]) + 1, ids=added)


def folder_differences(own: Path, given: Path) -> Iterator[str]:
    """A line on a folder whose tokens or colours are not those of the weights' ``own`` folder."""
    differences = []
    with contextlib.suppress(Exception):  # tokenizers', of one that is not there or damaged
        theirs, ours = (Tokenizer.from_file(str(each / FILE)).get_vocab() for each in (own, given))
        if moved := sorted(text for text, number in theirs.items() if ours.get(text) != number):
            differences.append(f"{len(moved)} tokens have other ids, such as {moved[0]!r}")
    images = [
        {**read_json(each / COMBINED_FILE).get("image_processor", {})}
        | read_json(each / IMAGE_FILE)
        for each in (own, given)
    ]
    for name in ("image_mean", "image_std"):
        before, now = (each.get(name) for each in images)
        if None not in (before, now) and before != now:
            differences.append(f"{name} is {now}, not {before}")
    if differences:
        yield f"{given} is not of the weights' own folder {own}: {'; '.join(differences)}."


def token_problems(
    model: Any, tokenizer: TokenizerFacts, *, special_tokens: Mapping[str, str]
) -> list[str]:
    """Where the model's token ids are none, or the tokenizer's differ, one sentence each."""
    problems, size = [], model.foundation.vocab_size
    for field, text in special_tokens.items():
        wanted, found = getattr(model, field), tokenizer.ids.get(text)
        if wanted is not None and not 0 <= wanted < size:
            problems.append(f"model.{field} is {wanted}, but the model has ids 0 to {size - 1}")
        elif found is None:
            problems.append(f"the tokenizer has no token {text} for model.{field}")
        elif wanted is not None and wanted != found:
            problems.append(f"model.{field} is {wanted}, but the tokenizer's {text} is {found}")
    return problems


def with_token_ids(
    model: Any, tokenizer: TokenizerFacts, *, special_tokens: Mapping[str, str]
) -> Any:
    """``model`` with the token ids it left to the tokenizer."""
    return dataclasses.replace(
        model, **{field: tokenizer.ids[text] for field, text in special_tokens.items()}
    )
