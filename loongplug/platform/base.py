"""What both platforms share: holding the tables applied for them."""

from loongplug.platform.active import forget
from loongplug.platform.replacements import ReplacementTable


class PlatformBase:
    """Tables applied for this platform, undone in reverse when it ends."""

    def __init__(self) -> None:
        self._tables: dict[str, ReplacementTable] = {}

    def use(self, table: ReplacementTable) -> None:
        """Apply ``table`` unless one of its name is applied already."""
        if table.name not in self._tables:
            table.apply()
            self._tables[table.name] = table

    def deactivate(self) -> None:
        """Undo every table; a second time does nothing."""
        while self._tables:
            _, table = self._tables.popitem()
            table.undo()
        forget(self)  # type: ignore[arg-type]
