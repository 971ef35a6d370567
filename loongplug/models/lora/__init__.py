"""LoRA: adapters beside parallel linears, where they go, and their names in ``peft``.

Nothing here reads or writes files (that is ``loongplug.checkpoint``) or knows of training's flags.
"""
