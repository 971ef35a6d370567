"""What is said of a command line before anything heavy is imported."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from pages.commands import script
from pages.upstream_flags import flag_lines

from loongplug.models.hf_config import hf_config
from loongplug.platform import upstream_flags
from loongplug.training.config import compose_model
from loongplug.training.flags import ACCUMULATION, OURS, PER_DEVICE, whole_parser
from loongplug.training.launch import check_before_torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "coming_from.md"
# Of loongplug train itself, and on the way.
LAUNCHERS = ("--ranks",)

# Runs each command line in one process, and prints its code and what heavy packages are there then.
COMMANDS = """
import json, sys
from loongplug import train
from loongplug.cli import app
for words in json.loads(sys.argv[1]):
    try:
        train.main(words[1:]) if words[0] == "train.py" else app(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else str(end.code)
    heavy = [name for name in ("torch", "megatron", "torchvision") if name in sys.modules]
    print("\\nEND", json.dumps([code, heavy]))
"""


def refusal(*flags: str, ranks: int | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the tests look at the message)
        check_before_torch(flags, ranks=ranks)
    return str(caught.value)


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))


def test_the_file_has_the_flags_of_the_installed_megatron() -> None:
    """PYTHONPATH=tests python -m pages.upstream_flags writes it."""
    head, *lines = upstream_flags.FILE.read_text().splitlines()
    assert f"megatron-core=={version('megatron-core')} " in head
    assert lines == flag_lines()


def test_wrong_words_end_before_anything_heavy_is_imported(tmp_path: Path, demo: Path) -> None:
    """Wrong flags and keys of each command that trains, help, and a check of rows."""
    folder = tmp_path / "hf"
    folder.mkdir()
    ids = [f"model.{name}=1" for name in ("image_token_id", "video_token_id")]
    ids += [f"model.vision_{name}_token_id=1" for name in ("start", "end")]
    composed = compose_model(model_name="qwen3_vl_tiny", overrides=ids)
    config = hf_config(composed.family.load_hugging_face(composed.config))
    (folder / "config.json").write_text(config.to_json_string())
    model, key = ("--model-name", "qwen3_vl_tiny"), "model.image_encoder.frezee=true"
    rows = "".join(f"{line}\n" for line in (demo / "train.jsonl").read_text().splitlines()[:10])
    (tmp_path / "ten.jsonl").write_text(rows)
    check = ("--tokenizer-model", str(demo / "processor"), "--seq-length", "99")
    check += ("--media-root", str(demo))
    commands = {
        ("train", "--ranks", "2", "--learning-rate", "3"): "here it is --lr 3",
        ("train", "--load-hf", str(folder), key): "the closest is freeze",
        ("train", "--help"): "--train-data-path",
        ("train.py", *model, key): "the closest is freeze",
        ("convert", "--lrr", "3"): "the closest is --lr",
        ("verify", *model, key): "the closest is freeze",
        ("estimate", "--ranks", "2", *model, key): "the closest is freeze",
        ("partition", "--ranks", "2", "--lrr", "3"): "the closest is --lr",
        ("bench", "step", "--lrr", "3"): "the closest is --lr",
        ("data", "check", str(tmp_path / "ten.jsonl"), *check): "10 rows in",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(list(commands))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=True,
    )
    *printed, rest = re.split(r"^END (.*)\n", done.stdout, flags=re.M)
    assert rest == "", done.stdout
    codes = []
    for said, end, expected in zip(printed[::2], printed[1::2], commands.values(), strict=True):
        code, heavy = json.loads(end)
        assert expected in f"{said}{code}", done.stdout
        assert heavy == [], (said, heavy)
        codes.append(code if isinstance(code, int) else 1)
    assert codes == [1, 1, 0, 1, 1, 2, 1, 1, 1, 0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "ranks", "said"),
    [
        ("--learning_rate 1e-4", None, "no flag --learning_rate; here it is --lr 1e-4"),
        ("--freeze-vit True", None, "here it is model.image_encoder.freeze=true"),
        ("--dataset a.jsonl b.jsonl --lr 1", None, "here it is --train-data-path a.jsonl b.jsonl"),
        ("--gradient-checkpointing false", None, "no flag --gradient-checkpointing; leave it out"),
        ("--do_train", None, "no flag --do_train; leave it out: a run trains"),
        ("--bf16 true", None, "true belongs to no flag: switches such as --bf16 take no value"),
        ("--save_steps 5 --bf16 true", None, "here it is --save-interval 5"),
        (
            "--per_device_train_batch_size 2 --gradient-accumulation-steps=4",
            None,
            "no flag --per_device_train_batch_size, --gradient-accumulation-steps; here it is"
            " --micro-batch-size 2 --global-batch-size G, where G is 2 x replicas x 4 of",
        ),
        (
            "--per_device_train_batch_size 2 --gradient-accumulation-steps=4"
            " --tensor-model-parallel-size 2 --context-parallel-size 2",
            16,
            "--micro-batch-size 2 --global-batch-size 32: 2 x 4 replicas"
            " (16 ranks / (tp 2 x pp 1 x cp 2)) x 4 of accumulation",
        ),
        ("--tensor-model-parallel-size two", None, "invalid int value: 'two'"),
    ],
)
def test_the_words_of_other_trainers_are_answered_with_ours(
    flags: str, ranks: int | None, said: str
) -> None:
    assert said in refusal(*flags.split(), ranks=ranks)


def test_commands_of_the_page_are_understood() -> None:
    """Theirs flag by flag, and ours as they are."""
    text = PAGE.read_text()
    texts = [each.replace("\\\n", " ") for each in re.findall(r"```text\n(.*?)```", text, re.S)]
    theirs = [shlex.split(each) for each in texts if "error" not in each]
    assert len(theirs) == 3
    for words in theirs:
        first = next(at for at, word in enumerate(words) if word.startswith("--"))
        lines = refusal(*words[first:]).splitlines()
        assert len(lines) > 10
        for line in lines:
            assert re.search("here it is|leave it out", line), line
    ours = [line for line in script(text).replace("\\\n", " ").splitlines() if " train " in line]
    assert len(ours) == 4
    for line in ours:
        _, _, ranks, _, *flags = shlex.split(line)
        assert ranks == "--ranks"
        check_before_torch(flags)


def test_our_words_are_right() -> None:
    """Ours exist, theirs do not, and the keys are those of a model."""
    known = {*whole_parser()._option_string_actions, *LAUNCHERS}
    assert len(OURS) > 40
    assert not {f"--{name}" for name in (*OURS, PER_DEVICE, ACCUMULATION)} & known
    assert flags_of(" ".join(OURS.values())) <= known
    values = {"freeze": "true", "rank": "8", "alpha": "8", "dropout": "0.5", "lr_mult": "0.5"}
    keys = {key for words in OURS.values() for key in re.findall(r"model\.[\w.]+", words)}
    keys.remove("model.foundation.lora.target_modules")
    overrides = [f"{key}={values[key.rpartition('.')[2]]}" for key in keys]
    overrides.append("model.foundation.lora.target_modules=[linear_qkv]")
    compose_model(model_name="qwen3_vl_tiny", overrides=overrides)


def test_help_is_two_screens_of_flags_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check_before_torch(["--device", "cpu", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    known = {*whole_parser()._option_string_actions, *LAUNCHERS, "--help-all"}
    assert flags_of(shown) <= known
    subjects = [line for line in lines if re.fullmatch(r"[a-z][\w ]*", line)]
    assert subjects == [
        *("where it runs", "data", "model", "layout", "batch and schedule", "what is trained"),
        *("saving and showing", "examples"),
    ]
    overrides = {*re.findall(r"model\.\w+\.[\w.]+=[\w.]+", shown)}
    assert len(overrides) > 5
    compose_model(
        model_name="qwen3_vl_tiny", overrides=[each.replace("=N", "=1") for each in overrides]
    )


def test_another_megatron_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags may be others: the parser itself is asked, as on every rank."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.19.9")
    check_before_torch(["--learning-rate", "3"])
