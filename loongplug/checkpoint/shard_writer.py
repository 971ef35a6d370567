"""Write named tensors as safetensors files of limited size, with an index if there are several."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loongplug.checkpoint.tensor_folder import INDEX_FILE, WEIGHTS_FILE

_METADATA = {"format": "pt", "written_by": "loongplug"}


def written_here(folder: Path) -> bool:
    """Whether all weights in ``folder`` were written by this module."""
    files = list(folder.glob("*.safetensors"))
    return bool(files) and all(_metadata(file) == _METADATA for file in files)


def _metadata(file: Path) -> dict[str, str] | None:
    try:
        with safe_open(file, framework="pt") as handle:
            return dict(handle.metadata() or {})
    except (OSError, SafetensorError):
        return None


class ShardWriter:
    """Takes tensors one by one and holds at most one file's worth of them in memory."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` to the CPU; writes a file first when it would grow beyond the limit."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        # A copy in any case: what was handed over may be a view of a live parameter.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give the files their final names, and the index if it needs one."""
        if self._pending:
            self._flush()
        count = len(self._files)
        if count == 1:
            self._files[0][0].rename(self._folder / WEIGHTS_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files):05d}.safetensors"
        save_file(self._pending, path, metadata=_METADATA)
        self._files.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0
