"""A build hook: wheel and sdist say in ``loongplug/commit.txt`` of which commit they are."""

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DESCRIBE = ("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


class CommitHook(BuildHookInterface):
    """Writes the file where the tree is git's; an sdist has it already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not Path(self.root, ".git").exists():
            return
        git = ("git", "-c", "safe.directory=*", "-C", self.root, *DESCRIBE)
        file = Path(self.root, "build", "commit.txt")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout)
        build_data["force_include"][str(file)] = "loongplug/commit.txt"
