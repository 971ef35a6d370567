"""The Qwen2.5-VL family: its image encoder with window attention, its projector, the config
classes of its YAML files, the Megatron arguments they decide, the builder of a pipeline stage, and
its Hugging Face names. What other families can use as well lives one folder up.
"""
