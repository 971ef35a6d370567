"""What a run shows of itself: who reports an event, how a trace is written, merged and drawn.

``recorder.py`` holds what anything above may be handed, and takes times; ``trace_file.py`` writes
them; ``hooks.py`` and ``tracing.py`` put a recorder into a run of Megatron, with ``--trace`` only;
the rest is ``loongplug trace``. Nothing here imports from loongplug beyond ``platform``.
"""
