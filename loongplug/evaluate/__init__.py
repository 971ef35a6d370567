"""Evaluation of an exported model: ``transformers`` answers a JSONL file, and answers are compared.

Nothing here knows Megatron: what is measured is the exported folder, as its users will load it.
"""

MAX_NEW_TOKENS = 32  # the longest answer, unless another is asked for
