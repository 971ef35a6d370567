"""Rows of Parquet files and of Hugging Face datasets saved to disk, by index.

Both are read as memory-mapped Arrow. A Parquet file is compressed in groups of thousands of rows,
each of which a shuffled run would decompress for one row: it is converted once, and kept.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from loongplug.data.cache_folder import LOG, alone, keep, places
from loongplug.data.data_options import ANY_ROW, RowAccess
from loongplug.data.media_files import InlineFile, MediaRoot, require_version, version
from loongplug.data.object_store import RemoteFile
from loongplug.data.row_files import media_root_of, parse_row_json
from loongplug.output_files import put_whole

_PARQUET = b"PAR1"
_STATE = "state.json"  # of a saved dataset; it names the files
_SPLITS = "dataset_dict.json"  # of several of them in one folder
_BATCH = 256  # rows converted at a time; images may be among them
_MADE_OF = b"loongplug.made_of"  # the version of the Parquet file, in the kept file's schema


def is_arrow(path: Path) -> bool:
    """Whether this is a Parquet file, a folder of some, or a saved dataset."""
    if path.is_dir():
        named = (path / _STATE, path / _SPLITS)
        return any(each.is_file() for each in named) or bool(_shards(path))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".parquet" or file.read(len(_PARQUET)) == _PARQUET


class ArrowRows:
    """The rows of a Parquet file, of a folder's Parquet files, or of a saved dataset, by index.

    A key whose value is null is absent, since a table has every key in every row. Images and sounds
    may stand in the row, as bytes or as Hugging Face's struct of ``bytes`` and ``path``.
    """

    def __init__(
        self, path: Path, *, access: RowAccess = ANY_ROW, copy_of: RemoteFile | None = None
    ) -> None:
        """ValueError where pyarrow is missing, and for what cannot be read."""
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"{path} is read by pyarrow, which is not installed: pip install"
                " 'loongplug[parquet]'."
            ) from error
        self.path = path
        self.access = access
        self.files, parquet = _files(path)  # those that the rows are of, in their order
        self._versions = [version(file) for file in self.files]
        self._names = self.files if copy_of is None else [copy_of]
        self._media_root = media_root_of(copy_of or self.files[0], access)
        self._batches: list[tuple[int, int, Any]] = []  # file, first row of the file's, rows
        for number, file in enumerate(self.files):
            first = 0
            for batch in _mapped_parquet(file) if parquet else _mapped(file):
                self._batches.append((number, first, batch))
                first += batch.num_rows
        self._ends = np.cumsum([batch.num_rows for *_, batch in self._batches], dtype=np.int64)
        if not len(self):
            raise ValueError(f"{path} has no rows: a dataset needs at least one.")
        self._checked: set[int] = set()  # batches

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def where(self, index: int) -> str:
        number, row = self._find(index)
        file, first, _ = self._batches[number]
        return f"{self._names[file]}:{first + row + 1}"

    def media_root(self, index: int) -> MediaRoot:
        return self._media_root

    def read(self, index: int) -> dict[str, Any]:
        """The row as a dictionary; ValueError when it is too large or damaged."""
        number, row_of_batch = self._find(index)
        file, _, batch = self._batches[number]
        require_version(self.files[file], self._versions[file])
        try:
            if number not in self._checked:  # places in the file may lead out of it
                batch.validate(full=True)
                self._checked.add(number)
            found = batch.slice(row_of_batch, 1)
            self.access.require_size(found.nbytes, where=self.where(index))
            (values,) = found.to_pylist()
        except _arrow_errors() as error:
            raise ValueError(f"{self.where(index)}: the row cannot be read ({error}).") from error
        row = {key: _plain(value) for key, value in values.items() if value is not None}
        return self.access.by_our_keys(row, where=self.where(index))

    def _find(self, index: int) -> tuple[int, int]:
        """The row's batch, and its number there."""
        batch = int(np.searchsorted(self._ends, index, side="right"))
        return batch, index - int(self._ends[batch]) + self._batches[batch][2].num_rows


def _plain(value: Any) -> Any:
    """A value as JSON would have it, without what is null; bytes are files within the row."""
    if isinstance(value, bytes):
        return InlineFile("file", value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path"}:
        return _plain(value["path"] if value["bytes"] is None else value["bytes"])
    return {key: _plain(each) for key, each in value.items() if each is not None}


def _files(path: Path) -> tuple[list[Path], bool]:
    """The files of rows, in their order, and whether they are Parquet."""
    if path.is_file():
        return [path], True
    if (path / _STATE).is_file():
        return _listed(path), False
    if (path / _SPLITS).is_file():
        splits = sorted(each.parent.name for each in path.glob(f"*/{_STATE}"))
        raise ValueError(
            f"{path} has several datasets, {', '.join(splits) or 'none of them there'}: give the"
            " folder of one of them."
        )
    return _shards(path), True


def _shards(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("*.parquet") if each.is_file())


def _listed(folder: Path) -> list[Path]:
    """The files that a saved dataset says it has, all in its own folder."""
    try:
        listed = parse_row_json((folder / _STATE).read_bytes())["_data_files"]
        names = [each["filename"] for each in listed]
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"_data_files names {names}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / _STATE} does not name the files of a saved dataset"
            f" ({type(error).__name__}: {error}): save it again with save_to_disk."
        ) from error
    return [folder / name for name in names]


def _mapped_parquet(path: Path) -> list[Any]:
    """The rows of a Parquet file as memory-mapped batches; converts the file unless it was."""
    before, found = version(path), places(path, suffix=".arrow")
    with alone(path):  # of the processes of a machine one converts, the others wait
        for place in filter(Path.is_file, found):
            with suppress(ValueError):  # made again where it is damaged or of another file
                return _mapped(place, made_of=before)
        what = f"{path} has to be converted to Arrow once, but the result"
        place = keep(found, lambda place: _convert(path, place, before), what)
    return _mapped(place, made_of=before)


def _convert(path: Path, place: Path, before: tuple[int, int]) -> None:
    """Write the rows to ``place``; OSError where that cannot be."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file, put_whole(place) as whole:
            LOG.warning("%s is converted to Arrow once, into %s.", path, place)
            # Values in the place of numbers of a dictionary, which differs by batch.
            schema = pa.schema(
                field.with_type(field.type.value_type)
                if pa.types.is_dictionary(field.type)
                else field
                for field in file.schema_arrow
            ).with_metadata({_MADE_OF: _words(before)})
            with pa.OSFile(str(whole), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                # No threads: processes that are forked later would not have them.
                for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
                    columns = [  # not by a cast, which mistakes parts of nested columns
                        column.dictionary_decode()
                        if pa.types.is_dictionary(column.type)
                        else column
                        for column in batch.columns
                    ]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
            if version(path) != before:
                raise ValueError(f"{path} changed while it was read: wait until it is whole.")
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system; others are of the file
        raise ValueError(f"{path} is not a Parquet file that can be read: {error}.") from error


def _mapped(path: Path, *, made_of: tuple[int, int] | None = None) -> list[Any]:
    """The batches of an Arrow stream, or of a file of that version of Parquet, memory-mapped."""
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)
    try:
        source = pa.memory_map(str(path))
        if made_of is None:  # save_to_disk writes streams
            return list(pa.ipc.open_stream(source, options=options))
        reader = pa.ipc.open_file(source, options=options)
        if (reader.schema.metadata or {}).get(_MADE_OF) != _words(made_of):
            raise ValueError(f"{path} was made of another file")
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except _arrow_errors() as error:
        raise ValueError(f"{path} is not an Arrow file that can be read ({error}).") from error


def _words(made_of: tuple[int, int]) -> bytes:
    return f"1 {made_of[0]} {made_of[1]}".encode()


def _arrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return pa.ArrowException, OSError, UnicodeDecodeError
