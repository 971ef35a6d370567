"""Cases of the rules in rules/freezing.py."""

from rule_cases.kinds import Cases, OverrideCases

_ALL = [f"{part}.freeze=True" for part in ("image_encoder", "image_projector", "foundation")]

CASES: Cases = {
    "exceptions": (
        [{"train_parameters": ["*norm*"]}],
        [{"train_parameters": ["*norm*"], "freeze_parameters": ["*"]}],
    ),
}

OVERRIDES: OverrideCases = {
    "something-trains": (
        [(1, _ALL), (2, _ALL)],
        [(1, _ALL[:2]), (1, _ALL[1:]), (1, [_ALL[0], _ALL[2]])],
    ),
}
