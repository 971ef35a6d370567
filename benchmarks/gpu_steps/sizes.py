"""How large each step is: on a GPU, and tiny for the CPU. Sizes of models are their YAML's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """A model, and the batch that it is trained on; an image of one of ``sides`` a sample."""

    model: str
    overrides: tuple[str, ...] = ()
    sides: tuple[int, ...]  # of square images, in pixels; multiples of 32
    seq_length: int  # of a packed row
    row_length: int  # that holds the longest sample
    batch: int  # rows of a step


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All of it."""

    product: int  # rows and columns of step 0's matrices
    copy_bytes: int
    tiny_iterations: int
    # Patches of each frame, by what the pack is like.
    vision_packs: tuple[tuple[str, tuple[int, ...]], ...]
    routed_tokens: int  # before each goes to its experts
    adam_elements: int
    rounds: int  # of a kernel, after its first call
    warmup: int
    steps: int
    frozen: ModelRun  # steps 3, 4 and 5
    trained: ModelRun  # step 6
    experts: ModelRun  # step 7

    def all_runs(self) -> tuple[ModelRun, ...]:
        """Those of all steps."""
        return TINY_RUN, self.frozen, self.trained, self.experts


# Step 1's runs are of these in all sizes: their losses are compared, not their times.
TINY_MODEL = "qwen3_vl_tiny"
TINY_RUN = ModelRun(model=TINY_MODEL, sides=(64,), seq_length=128, row_length=64, batch=4)

_FROZEN = "model.image_encoder.freeze=true"

FULL = Sizes(
    product=8192,
    copy_bytes=8 * 10**9,
    tiny_iterations=3,
    vision_packs=(
        ("1 x 4,096", (4096,)),
        ("8 x 1,024", (1024,) * 8),
        ("8 mixed", (256, 576, 1024, 1600, 2304, 3136, 4096, 784)),
        ("200 windows", (64,) * 200),
    ),
    routed_tokens=4096,
    adam_elements=10**9,
    rounds=10,
    warmup=3,
    steps=5,
    frozen=ModelRun(
        model="qwen3_vl_8b",
        overrides=("model.foundation.num_layers=18", _FROZEN),
        sides=(1024,),
        seq_length=4096,
        row_length=1088,
        batch=4,
    ),
    trained=ModelRun(
        model="qwen3_vl_2b",
        sides=(256, 512, 768, 1024),
        seq_length=1088,
        row_length=1088,
        batch=8,
    ),
    experts=ModelRun(
        model="qwen3_vl_30b_a3b",
        overrides=("model.foundation.num_layers=4", _FROZEN),
        sides=(1024,),
        seq_length=4096,
        row_length=1088,
        batch=4,
    ),
)

TINY = Sizes(
    product=128,
    copy_bytes=2**20,
    tiny_iterations=2,
    vision_packs=(("2 x 64", (64,) * 2), ("3 mixed", (16, 64, 36))),
    routed_tokens=32,
    adam_elements=2**14,
    rounds=2,
    warmup=1,
    steps=1,
    frozen=ModelRun(
        model=TINY_MODEL,
        overrides=(_FROZEN,),
        sides=(128,),
        seq_length=128,
        row_length=64,
        batch=2,
    ),
    trained=ModelRun(model=TINY_MODEL, sides=(64, 128), seq_length=64, row_length=64, batch=2),
    experts=ModelRun(
        model="qwen3_vl_moe_tiny",
        overrides=(_FROZEN,),
        sides=(64,),
        seq_length=64,
        row_length=64,
        batch=2,
    ),
)
