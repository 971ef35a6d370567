"""Where LoongPlug's own data files are, in a checkout and in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def configs_dir(*, package: Path = _PACKAGE) -> Path:
    """The folder with ``models/``: inside an installed package, beside it in a checkout.

    Raises:
        FileNotFoundError: neither place has it, so the installation is incomplete.
    """
    candidates = (package / "configs", package.parent / "configs")
    for candidate in candidates:
        if (candidate / "models").is_dir():
            return candidate
    tried = " and ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(
        f"LoongPlug's model configs are missing (looked in {tried}); install the package again"
    )
