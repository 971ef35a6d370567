"""How far ahead of the decoder the stages of modules on ranks of their own work. Pure.

Modules are pipelines that lead into one another and at last into the decoder. Each rank runs
Megatron's 1F1B: some forwards to warm up, then a forward and a backward in turn, then the
backwards that are left. With as many warm-up forwards as stages lie between it and the decoder's
last one, no rank waits for a gradient that its own next output is needed for, as long as nobody
waits for a send between modules (figure 4(a) and appendix D of the MIMO paper; upstream counts
from the sources instead, which is too many where encoders are not equally deep).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GraphModule:
    """A module's pipeline; ``into`` names the module that its last stage sends to.

    ``into`` is None for the decoder alone, the one sink.
    """

    name: str
    stages: int
    into: str | None = None


def distances(modules: Sequence[GraphModule]) -> dict[tuple[str, int], int]:
    """Of each module's each stage, how many stages lie behind it on the way; 0 for the last.

    Raises:
        ValueError: two modules have one name, one has no stage, one leads nowhere or in a circle,
            or there is not one decoder.
    """
    graph = _checked(modules)
    found = {}
    for module in modules:
        behind = sum(each.stages for each in _way_behind(module, graph))
        for stage in range(module.stages):
            found[module.name, stage] = behind + module.stages - 1 - stage
    return found


def ahead(*, pipeline: int, virtual: bool, group: int | None = None) -> int:
    """Forwards of the decoder's first chunk before its first backward.

    ``pipeline`` is the decoder's pipeline parallel size. ``virtual``: its ranks hold several
    chunks each, and Megatron's interleaved schedule runs ``group`` microbatches of a chunk before
    it goes on to the next; None for its default, as many as stages. More chunks or the overlap of
    MoE communication change nothing, and a ``group`` of more can need less than this.
    """
    assert pipeline > 0, pipeline
    if not virtual or pipeline == 1:
        return pipeline
    return 2 * (group or pipeline)


def warmup(*, microbatches: int, ahead: int, stages: int, stage: int) -> int:
    """How many forwards an encoder's ``stage``, of ``stages``, does before its first backward.

    ``ahead`` is what comes behind the last of them (:func:`ahead`). Where the decoder runs plain
    1F1B, this is the distance to its last stage, or all of a short step.
    """
    assert 0 <= stage < stages, (stage, stages)
    return min(microbatches, ahead + stages - 1 - stage)


def in_flight(*, ahead: int, stages: int, stage: int) -> int:
    """How many microbatches an encoder's ``stage`` can have sent that nobody has taken yet.

    One more than its longest warm-up (:func:`warmup`). Where gradients come back to it, nothing
    ever waits for that: before each forward, the gradient of the microbatch so many before is here.
    Where none do, nothing else holds the stage back, and so it keeps no more than a stage that
    trains.
    """
    return ahead + stages - stage


def _checked(modules: Sequence[GraphModule]) -> Mapping[str, GraphModule]:
    """The modules by name; ValueError where they are no graph that ends in one decoder."""
    names = Counter(module.name for module in modules)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(f"two modules are called {twice[0]!r}: rename one of them.")
    graph = {module.name: module for module in modules}
    for module in modules:
        if module.stages < 1:
            raise ValueError(
                f"{module.name!r} has {module.stages} pipeline stages: expected at least 1, so "
                f"raise its pipeline_model_parallel_size."
            )
        if module.into is not None and module.into not in graph:
            raise ValueError(
                f"what comes out of {module.name!r} goes into {module.into!r}, which is no module: "
                f"expected one of {', '.join(sorted(graph))}."
            )
    sinks = [module.name for module in modules if module.into is None]
    if len(sinks) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, sinks))} lead into no other module: expected one decoder, so "
            f"say of the others which module each leads into."
        )
    for module in modules:
        _way_behind(module, graph)
    if not sinks:
        raise ValueError("there is no module: expected a decoder, and what leads into it.")
    return graph


def _way_behind(module: GraphModule, graph: Mapping[str, GraphModule]) -> list[GraphModule]:
    """The modules from the one that this leads into to the decoder; ValueError for a circle."""
    way: list[GraphModule] = []
    while module.into is not None:
        module = graph[module.into]
        if module in way:
            circle = [each.name for each in way[way.index(module) :]]
            raise ValueError(
                f"modules lead into one another in a circle, {' into '.join([*circle, circle[0]])}:"
                f" let one of them lead into the decoder instead."
            )
        way.append(module)
    return way
