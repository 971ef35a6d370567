"""What a run shows of itself: who reports an event, how a trace is written, merged and drawn.

``recorder.py`` holds the interface that anything above may be handed, and its empty
implementation; ``clocks.py`` and ``trace_file.py`` take times and write them; ``hooks.py``,
``module_hooks.py`` and ``tracing.py`` put a recorder into a run of Megatron, with ``--trace``
only; the rest is ``loongplug trace``, which reads what was written. Nothing here imports from
loongplug beyond ``platform``, so every other folder may report to it.
"""
