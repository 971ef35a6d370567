"""A member of an archive as a file: its bytes, no others, and no more of them than asked for."""

import os

import pytest

from loongplug.data.media_files import TarMember, open_media_file

pytestmark = pytest.mark.quick

WHOLE = bytes(range(256)) * 64


@pytest.fixture
def member(tmp_path) -> TarMember:
    (tmp_path / "a.tar").write_bytes(b"before" + WHOLE + b"behind")
    return TarMember(tmp_path / "a.tar", "k.bin", offset=6, size=len(WHOLE))


def test_it_reads_like_a_file(member, tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(WHOLE)
    assert str(member) == f"{tmp_path}/a.tar:k.bin"
    with open_media_file(member) as one, open_media_file(plain) as other:
        for offset, whence, count in (
            (0, os.SEEK_SET, 10),
            (5000, os.SEEK_CUR, 9000),
            (-100, os.SEEK_END, 500),
            (300, os.SEEK_END, 5),
            (0, os.SEEK_SET, -1),
        ):
            assert one.seek(offset, whence) == other.seek(offset, whence)
            assert one.read(count) == other.read(count)
            assert one.tell() == other.tell()
        with pytest.raises((OSError, ValueError)):
            one.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        one.read()
