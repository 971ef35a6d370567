"""Evaluation of an exported model: ``transformers`` answers a JSONL file, and answers are compared.

Nothing here knows Megatron or process groups: what is measured is the exported folder, as its
users will load it. Metrics during training do not belong here.
"""

MAX_NEW_TOKENS = 32  # the longest answer, unless another is asked for
