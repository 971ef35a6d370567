"""Traps that the design tells of and no built-in fault is: what, where, and why."""

NOT_HERE: tuple[tuple[str, str, str], ...] = (
    (
        "copies to and from the host are used before they are done",
        "gpu.md, found sound",
        "The CPU copies at once; `tests/stand_in/test_faults.py` leaves out each wait in turn.",
    ),
    (
        "features are used while their exchange is under way; a copy stream of another device",
        "gpu.md A2, B7",
        "gloo's answer depends on who is faster; the stand-in device finds both.",
    ),
    (
        "weights are loaded while their module is on the host",
        "gpu.md A1",
        "The CPU is the host; the stand-in device ends with NCCL's words.",
    ),
    (
        "pixels are assigned by cost and features in turn",
        "planner-data.md S1",
        "One field of the microbatch says both, and a unit that was not loaded ends the rank.",
    ),
    (
        "a row of pixels as bytes becomes one of values frame by frame, not channel by channel",
        "planner-data.md S3",
        "The runs' images are gray, so no run shows it: `tests/data/test_media_loader.py` does.",
    ),
    (
        "replicas plan by a time limit, or each by costs of its own",
        "planner-data.md S3",
        "The assignment is counted, without a clock; which replica encodes changes no number.",
    ),
    (
        "a pack's later samples begin at another position than 0",
        "context-parallel.md C2",
        "Changes nothing: rotary angles are relative, and attention stays within a sample.",
    ),
    (
        "batched sends of both directions are swapped (PP 2 with virtual stages)",
        "placement.md P3",
        "Refused by the rule `virtual-overlap` before anything runs.",
    ),
    (
        "an encoder on ranks of its own keeps its random state under the decoder's key",
        "placement.md P2",
        "Its chunks have a key of their own; the small models draw nothing that would show it.",
    ),
    (
        "an encoder's ranks count samples by the replicas of their own",
        "placement.md P2, mpu at rest",
        "A checkpoint has the decoder's count; ranks that disagree on a step's length do not end.",
    ),
    (
        "documents of a row see each other through a mask word",
        "context-parallel.md C2",
        "There are no mask words; segments that see each other are found as in the next row.",
    ),
    (
        "tiles are merged by another logsumexp or order; gradients of other ranks' keys are lost",
        "context-parallel.md, torch; C1",
        "Faults of `tests/models/layers/test_context_attention.py`, which has attention alone.",
    ),
    (
        "a causal tile with unequal sides is cut at its upper left",
        "context-parallel.md, torch",
        "Tiles are squares or full: `tests/context/test_tiles.py` has each pair once.",
    ),
    (
        "a class token is counted as a patch; a sound's state gets another one's position",
        "placement.md P1, numbers",
        "Mutations of `tests/models/test_patch_transformer.py` and `test_audio_transformer.py`.",
    ),
    (
        "norms of queries and keys that span heads are taken of a rank's heads",
        "placement.md P1, pitfalls",
        "Such a tower is not among the parts.",
    ),
    (
        "a generator's counts, noise and distances",
        "placement.md P4",
        "There is no generator today.",
    ),
)
