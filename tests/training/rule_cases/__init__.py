"""Cases of every rule, in a file for each file of the rules, and here all of them together."""

import pkgutil
from importlib import import_module

from rule_cases.kinds import Case

_FILES = sorted({each.name for each in pkgutil.iter_modules(__path__)} - {"kinds"})
_RUNS = {"CASES": "dense", "WITH_EXPERTS": "experts", "OMNI": "omni", "QWEN2_5": "qwen2_5"}

# The run, the name of the rule, what violates it and nothing else, and what is valid.
CASES: list[tuple[str, str, list[Case], list[Case]]] = [
    (run, rule, bad, good)
    for file in _FILES
    for table, run in _RUNS.items()
    for rule, (bad, good) in getattr(import_module(f"rule_cases.{file}"), table, {}).items()
]
