"""``python -m loongplug``: the ``loongplug`` command."""

from loongplug.cli import app

app()
