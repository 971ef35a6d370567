"""The launch scripts that people copy: their flags, their layouts, and whether these fit."""

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from command_lines import write_tokenizer
from ranks import run_ranks

from loongplug.estimate.ranks import State, as_rank, rank_state
from loongplug.estimate.run_of_flags import parsed_for
from loongplug.hetero.modes import ENCODER_HETERO_DP, FULL_HETERO_DP, UNIFORM, mode_of
from loongplug.models.hf_config import hf_config
from loongplug.training.arguments import ParsedArguments, complete, parse_arguments
from loongplug.training.config import available_models, compose_model
from loongplug.training.defaults import apply_defaults
from loongplug.training.flags import read_command_line
from loongplug.training.rules import violations

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LAUNCHER = "loongplug.parallel.launch"
UNIFORM_PAGE = SCRIPTS.parent / "docs" / "models.md"
MODES_PAGE = SCRIPTS.parent / "docs" / "heterogeneous_parallelism.md"
MODES = {
    "uniform": UNIFORM,
    "encoder-hetero-dp": ENCODER_HETERO_DP,
    "full-hetero-dp": FULL_HETERO_DP,
}
COLUMNS = {
    (UNIFORM.name, 8): (UNIFORM_PAGE, 3),
    (UNIFORM.name, 16): (UNIFORM_PAGE, 4),
    (UNIFORM.name, 32): (UNIFORM_PAGE, 5),
    (FULL_HETERO_DP.name, 8): (MODES_PAGE, 2),
    (ENCODER_HETERO_DP.name, 32): (MODES_PAGE, 3),
    (FULL_HETERO_DP.name, 32): (MODES_PAGE, 4),
}
# Bytes of weights, gradients and optimizer state, and of what the optimizer's step takes besides;
# the rest of 80 GB is activations', the CUDA context's and NCCL's.
FITS = 72e9
ONE_NODE = {"NNODES": "1"}
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
FOUR_NODES = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "node0"}


@dataclass(frozen=True, kw_only=True)
class Script:
    """A launch script, and the parallel sizes of its layouts.

    ``folder`` is the name of the model that MODEL_DIR is a folder of, for a script that takes any.
    """

    name: str
    model: str
    folder: str | None = None
    phase: str
    tp: int
    ep: int = 1
    layers: int

    @property
    def row(self) -> str:
        """What its row of the docs' tables begins with."""
        return f"`{self.name}`" if self.folder is None else f"`{self.name}`, {self.folder}"

    def __str__(self) -> str:
        return self.name if self.folder is None else f"{self.name}-{self.folder}"


ALL = (
    Script(name="sft", model="qwen3_vl_8b", folder="Qwen3-VL-8B", phase="sft", tp=2, layers=36),
    Script(name="sft", model="qwen2_5_vl_7b", folder="Qwen2.5-VL-7B", phase="sft", tp=2, layers=28),
    Script(
        name="sft_qwen3_vl_30b_a3b", model="qwen3_vl_30b_a3b", phase="sft", tp=2, ep=8, layers=48
    ),
    Script(
        name="pretrain_qwen3_vl_30b_a3b",
        model="qwen3_vl_30b_a3b",
        phase="pretrain",
        tp=2,
        ep=8,
        layers=48,
    ),
)
OVERLAP = Script(
    name="sft_qwen3_vl_30b_a3b_full_separation_overlap",
    model="qwen3_vl_30b_a3b",
    phase="sft",
    tp=1,
    ep=4,
    layers=48,
)
OVERLAP_PAGE = SCRIPTS.parent / "docs" / "moe_overlap.md"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a script gives torchrun: its own arguments, and those of train.py.

    ``connections`` is CUDA_DEVICE_MAX_CONNECTIONS, ``allocator`` PYTORCH_ALLOC_CONF; ``warned`` is
    what the script itself said.
    """

    connections: int
    allocator: str
    warned: str
    launcher: dict[str, str]
    argv: list[str]

    @property
    def world_size(self) -> int:
        return int(self.launcher["--nnodes"]) * int(self.launcher["--nproc_per_node"])


def launch(script: Script, folder: Path, *more: str, **environment: str) -> Launch:
    model = folder / "model"
    composed = compose_model(model_name=script.model)
    special = composed.family.special_tokens
    tokens = {text: getattr(composed.config, name) for name, text in special.items()}
    write_tokenizer(model, tokens=tokens)
    hf_config(composed.family.load_hugging_face(composed.config)).save_pretrained(model)
    (folder / "data.jsonl").write_text("{}\n")
    stub = folder / "bin" / "python"
    stub.parent.mkdir(exist_ok=True)
    variables = '"$CUDA_DEVICE_MAX_CONNECTIONS" "$PYTORCH_ALLOC_CONF"'
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" {variables} "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        [SCRIPTS / f"{script.name}.sh", "--device", "cpu", *more],
        env={
            "PATH": f"{stub.parent}:{os.environ['PATH']}",
            "MODEL_DIR": str(model),
            "TRAIN_DATA": str(folder / "data.jsonl"),
            "OUTPUT_DIR": str(folder / "out"),
            **environment,
        },
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout.splitlines()
    connections, allocator, *module = said[:4]
    assert module == ["-m", LAUNCHER]
    said = said[4:]
    at = said.index(str(SCRIPTS.parent / "loongplug" / "train.py"))
    return Launch(
        connections=int(connections),
        allocator=allocator,
        warned=done.stderr,
        launcher=dict(zip(said[:at:2], said[1:at:2], strict=True)),
        argv=said[at + 1 :],
    )


def parse(launched: Launch) -> ParsedArguments:
    """Parse and check in this process, in the first rank's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(launched.world_size))
        patch.setenv("RANK", "0")
        # As on GPUs, where nothing streams before it is asked for.
        return parse_arguments([*launched.argv, "--full-hetero-dp-schedule", "separated"])


def state_bytes(rank: int, *, launched: Launch) -> list[State]:
    """What the first rank of every stage holds, built on meta."""
    dist.destroy_process_group()  # the harness's, which has one rank
    os.environ["WORLD_SIZE"] = str(launched.world_size)
    parsed = parse_arguments(launched.argv)
    stages = parsed.args.pipeline_model_parallel_size
    found = []
    for stage in range(stages):
        with as_rank(parsed, stage * launched.world_size // stages) as built:
            states = rank_state(built.chunks, parsed.args).values()
        found.append(sum(states, State()))
    return found


def written(stages: list[State]) -> str:
    """Of the fullest GPU, as the docs have it: what it holds, and what the step takes besides."""
    held = [(sum(each.by_name().values()), each.step) for each in stages]
    kept, step = max(held, key=sum)
    assert kept + step < FITS, held
    return f"{kept / 1e9:.1f} + {step / 1e9:.1f} GB"


# Every script.


def test_an_estimate_takes_the_flags_of_a_launch(tmp_path: Path) -> None:
    """Also those of kernels that the machine of the estimate has not."""
    kernels = ("--transformer-impl", "transformer_engine", "--moe-permute-fusion")
    launched = launch(OVERLAP, tmp_path, *kernels)
    given = read_command_line(launched.argv).args
    assert (given.transformer_impl, given.moe_permute_fusion) == ("transformer_engine", True)
    args = parsed_for(launched.argv, ranks=launched.world_size, stand_ins=tmp_path).args
    assert (args.transformer_impl, args.moe_permute_fusion) == ("local", False)
    assert args.world_size == launched.world_size


def test_all_scripts_are_tested() -> None:
    texts = {file.stem: file.read_text() for file in SCRIPTS.glob("*.sh")}
    assert {name for name, text in texts.items() if LAUNCHER in text} == {"quickstart", "common"}
    sharing = {name for name, text in texts.items() if '/common.sh"' in text}
    assert sharing == {script.name for script in (*ALL, OVERLAP)}


@pytest.mark.quick
@pytest.mark.parametrize("script", [*ALL, OVERLAP], ids=str)
def test_script_is_bash_that_asks_for_its_paths(script: Script, tmp_path: Path) -> None:
    file = SCRIPTS / f"{script.name}.sh"
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=120)
    environment = {"PATH": os.environ["PATH"]}
    for name, value in (
        ("MODEL_DIR", "model"),
        ("TRAIN_DATA", "data.jsonl"),
        ("NODE_RANK", "1"),
        ("MASTER_ADDR", "node0"),
    ):
        ended = subprocess.run(
            [file], env={**environment, "NNODES": "2"}, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode != 0
        assert f"set {name} to " in ended.stderr
        environment[name] = value


@pytest.mark.quick
def test_an_allocator_that_is_set_stays(tmp_path: Path) -> None:
    own = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert launch(ALL[0], tmp_path, **own).allocator == own["PYTORCH_ALLOC_CONF"]
    by_the_old_name = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert launch(ALL[0], tmp_path, **by_the_old_name).allocator == ""


LAYOUTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "one-node": (ONE_NODE, {}),
    "two-nodes": (TWO_NODES, {}),
    "four-nodes-pp2": (FOUR_NODES, {"PP": "2", "VALID_DATA": "data.jsonl"}),
    "one-node-separated": (ONE_NODE, {"MODE": "full-hetero-dp"}),
    "four-nodes-pp2-hetero-dp": (FOUR_NODES, {"PP": "2", "MODE": "encoder-hetero-dp"}),
    "four-nodes-pp2-separated": (FOUR_NODES, {"PP": "2", "MODE": "full-hetero-dp"}),
}


@pytest.mark.parametrize(
    ("script", "layout"),
    [
        # Every script, and every layout of one; the others' figures in the docs with --all.
        pytest.param(
            script,
            layout,
            marks=() if script is ALL[0] or layout == "one-node" else pytest.mark.sweep,
        )
        for script in ALL
        for layout in LAYOUTS
    ],
    ids=str,
)
def test_script_s_run_is_accepted_and_fits(script: Script, layout: str, tmp_path: Path) -> None:
    nodes, more = LAYOUTS[layout][0], dict(LAYOUTS[layout][1])
    if "VALID_DATA" in more:
        more["VALID_DATA"] = str(tmp_path / more["VALID_DATA"])
    launched = launch(script, tmp_path, **nodes, **more)
    assert launched.launcher["--nnodes"] == nodes["NNODES"]
    assert launched.launcher["--node_rank"] == nodes.get("NODE_RANK", "0")
    assert launched.launcher["--master_addr"] == nodes.get("MASTER_ADDR", "localhost")
    assert launched.world_size == 8 * int(nodes["NNODES"])
    assert launched.connections == 1
    assert launched.allocator == "expandable_segments:True"
    parsed = parse(launched)
    args, pp = parsed.args, int(more.get("PP", "1"))
    mode = MODES[more.get("MODE", "uniform")]
    assert mode_of(args) == mode
    assert args.training_phase == script.phase
    assert parsed.family.name == available_models()[script.model].parent.name
    assert args.num_layers == script.layers
    assert args.data_parallel_size * script.tp * pp == launched.world_size
    assert args.context_parallel_size == 1
    assert args.expert_model_parallel_size == script.ep
    assert args.bf16
    assert args.sequence_parallel
    assert args.use_distributed_optimizer
    assert args.packing
    assert args.load == args.save
    assert args.load_hf == args.tokenizer_model == str(tmp_path / "model")
    assert args.save_hf == str(tmp_path / "out" / "hf")
    assert parsed.model.image_encoder.freeze is (script.phase == "sft")
    if "VALID_DATA" in more:
        assert (args.eval_iters, args.eval_interval) == (None, 200)
    if script.ep > 1:
        assert args.expert_tensor_parallel_size == 1
        assert args.moe_token_dispatcher_type == "alltoall"
        assert bool(args.moe_aux_loss_coeff) == (script.phase == "pretrain")
    (stages,) = run_ranks(state_bytes, 1, launched=launched, timeout=120.0)
    assert len(stages) == pp
    assert documented(script, mode.name, launched.world_size).startswith(written(stages))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llava_1_5_7b", 32), ("internvl3_8b", 28), ("qwen2_audio_7b", 32), ("qwen2_5_omni_7b", 28)],
    ids=str,
)
def test_a_folder_of_any_family_is_taken_with_all_its_encoders(
    name: str, layers: int, tmp_path: Path
) -> None:
    script = Script(name="sft", model=name, folder=name, phase="sft", tp=2, layers=layers)
    for given, frozen in (({}, True), ({"FREEZE_ENCODER": "false"}, False)):
        parsed = parse(launch(script, tmp_path, **given))
        assert parsed.family.name == available_models()[name].parent.name
        assert parsed.args.num_layers == layers
        encoders = [parsed.model.encoder(each) for each in parsed.model.encoders]
        assert [each.freeze for each in encoders] == [frozen] * len(encoders)


@pytest.mark.parametrize(
    ("nodes", "column"), [(ONE_NODE, 1), (FOUR_NODES, 2)], ids=["one-node", "four-nodes"]
)
def test_overlapped_run_is_accepted_and_fits(
    nodes: dict[str, str], column: int, tmp_path: Path
) -> None:
    launched = launch(OVERLAP, tmp_path, **nodes)
    assert launched.connections == 32
    parsed = parse(launched)
    args = parsed.args
    assert mode_of(args) == FULL_HETERO_DP
    assert args.overlap_moe_expert_parallel_comm
    assert args.delay_wgrad_compute
    assert args.packing
    assert args.recompute_granularity == "selective"
    assert args.virtual_pipeline_model_parallel_size == 2
    assert args.pipeline_model_parallel_size == 2
    assert args.expert_model_parallel_size == OVERLAP.ep
    assert args.num_layers == OVERLAP.layers
    assert args.offload_tensors == ["dispatched_input", "pre_mlp_layernorm_input"]
    assert parsed.model.image_encoder.freeze
    (stages,) = run_ranks(state_bytes, 1, launched=launched, timeout=120.0)
    (line,) = (
        line for line in OVERLAP_PAGE.read_text().splitlines() if line.startswith("| weights, grad")
    )
    assert line.split("|")[1 + column].strip() == written(stages)


@pytest.mark.parametrize("engine", [False, True], ids=["without-engine", "with-engine"])
@pytest.mark.parametrize("script", [ALL[0], ALL[2], OVERLAP], ids=str)
def test_script_s_run_is_accepted_where_apex_is(
    script: Script, engine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused gradient accumulation, which Apex brings, is off where it cannot be."""
    launched = launch(script, tmp_path)
    parsed, line = parse(launched), read_command_line(launched.argv)
    args = line.args
    complete(args, device="cuda")
    args.world_size = launched.world_size
    for name, argument in parsed.family.megatron_arguments(parsed.model).items():
        setattr(args, name, argument.value)
    there = {"fused_weight_gradient_mlp_cuda": True, "transformer_engine": engine}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: there[name] or None if name in there else find(name),
    )
    apply_defaults(args, given=line.flags, backend="nccl")
    assert violations(args, parsed.model) == []
    assert args.gradient_accumulation_fusion is (script is not OVERLAP)


def documented(script: Script, mode: str, world_size: int) -> str:
    """What the docs' tables say that the script's fullest GPU holds."""
    page, column = COLUMNS[mode, world_size]
    (line,) = (
        line for line in page.read_text().splitlines() if line.startswith(f"| {script.row} |")
    )
    return line.split("|")[column].strip()


@pytest.mark.quick
def test_mode_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        launch(ALL[0], tmp_path, MODE="full")
    assert "MODE is full: it has to be uniform, " in refused.value.stderr


@pytest.mark.quick
def test_microbatches_of_several_samples_are_packed_or_not(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        launch(ALL[0], tmp_path, MICRO_BATCH_SIZE="4")
    assert "MICRO_BATCH_SIZE is 4, but a pack of samples is a microbatch" in refused.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as refused:
        launch(ALL[0], tmp_path, PACKING="no")
    assert "PACKING is no: it has to be true or false" in refused.value.stderr
    args = parse(launch(ALL[0], tmp_path, MICRO_BATCH_SIZE="4", PACKING="false")).args
    assert (args.micro_batch_size, args.packing) == (4, False)


@pytest.mark.quick
def test_encoder_s_ranks_come_by_environment(tmp_path: Path) -> None:
    given = {"ENCODER_RANK_OFFSET": "8", "ENCODER_DP": "3", "ENCODER_TP": "2", "ENCODER_PP": "2"}
    launched = launch(ALL[0], tmp_path, GPUS_PER_NODE="20", **given)
    encoder = parse(launched).model.image_encoder
    assert (encoder.rank_offset, encoder.data_parallel_size) == (8, 3)
    assert (encoder.tensor_model_parallel_size, encoder.pipeline_model_parallel_size) == (2, 2)


@pytest.mark.quick
@pytest.mark.parametrize("script", [ALL[0], OVERLAP], ids=str)
def test_rows_are_shared_by_as_many_gpus_as_the_environment_says(
    script: Script, tmp_path: Path
) -> None:
    args = parse(launch(script, tmp_path, CP="2")).args
    assert args.context_parallel_size == 2
    assert args.data_parallel_size == 8 // (2 * script.tp * args.pipeline_model_parallel_size)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("pp", "more", "replicas", "least"),
    [
        ("1", {"GLOBAL_BATCH_SIZE": "8"}, 0, 0),
        ("4", {"GLOBAL_BATCH_SIZE": "128"}, 0, 0),
        ("4", {"GLOBAL_BATCH_SIZE": "120"}, 8, 128),
        ("2", {"GLOBAL_BATCH_SIZE": "124", "PACKING": "false", "MICRO_BATCH_SIZE": "2"}, 16, 256),
        ("2", {"GLOBAL_BATCH_SIZE": "60", "ENCODER_RANK_OFFSET": "32"}, 8, 64),
    ],
)
def test_too_few_microbatches_for_the_stages_are_said_once(
    tmp_path: Path, pp: str, more: dict[str, str], replicas: int, least: int
) -> None:
    nodes = {"NNODES": "8", "NODE_RANK": "0", "MASTER_ADDR": "node0", **more}
    stages = ("--pipeline-model-parallel-size", pp)  # wins over the script's
    warned = launch(ALL[0], tmp_path, *stages, **nodes).warned
    if not least:
        assert warned == ""
        return
    assert f"gives each of {replicas} replicas " in warned
    assert f"raise GLOBAL_BATCH_SIZE to {least}, or lower PP" in warned
    assert launch(ALL[0], tmp_path, *stages, **nodes | {"NODE_RANK": "1"}).warned == ""


# What is given to a script wins over what it says.


@pytest.mark.quick
def test_flags_and_overrides_behind_the_script_win(tmp_path: Path) -> None:
    parsed = parse(launch(ALL[0], tmp_path, "--lr", "3e-6", "model.image_encoder.freeze=false"))
    assert parsed.args.lr == 3e-6
    assert not parsed.model.image_encoder.freeze


@pytest.mark.quick
@pytest.mark.parametrize("script", [ALL[0], OVERLAP], ids=str)
def test_an_encoder_that_trains_computes_its_layers_twice(script: Script, tmp_path: Path) -> None:
    frozen = parse(launch(script, tmp_path)).model.image_encoder
    assert (frozen.freeze, frozen.recompute) == (True, False)
    trained = parse(launch(script, tmp_path, FREEZE_ENCODER="false")).model.image_encoder
    assert (trained.freeze, trained.recompute) == (False, True)
    more = {"FREEZE_ENCODER": "false", "RECOMPUTE_ENCODER": "false"}
    assert not parse(launch(script, tmp_path, **more)).model.image_encoder.recompute


@pytest.mark.quick
def test_an_encoder_is_split_over_two_ranks_at_most_unless_it_is_told(tmp_path: Path) -> None:
    def tp(**environment: str) -> int | None:
        parsed = parse(launch(ALL[0], tmp_path, **environment))
        size: int | None = parsed.model.image_encoder.tensor_model_parallel_size
        return size

    assert tp() is None  # the decoder's, which is 2
    assert tp(TP="4") == 2
    assert tp(TP="4", ENCODER_TP="4") == 4
    assert tp(TP="4", MODE="full-hetero-dp") is None  # 1 there
