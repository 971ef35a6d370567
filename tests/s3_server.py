"""An S3 server on this machine's loopback, for tests, which notes what it is asked for."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class S3:
    """The server with one bucket, and its client."""

    client: Any
    stop: Callable[[], None]
    asked: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, bytes sent
    bucket: str = "bucket"
    pause: float = 0.0  # seconds before each answer
    most_at_once: int = 0  # requests that waited for their answers

    def put(self, key: str, content: bytes | Path) -> str:
        """Write an object and give its URL."""
        body = content.read_bytes() if isinstance(content, Path) else content
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body)
        return f"s3://{self.bucket}/{key}"

    def put_folder(self, folder: Path, *, prefix: str) -> str:
        """Write all files below a folder and give the URL of the prefix."""
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path)
        return f"s3://{self.bucket}/{prefix}"

    def fetched(self, key: str) -> list[int]:
        """How many bytes each GET of the object has sent so far."""
        return [
            sent
            for method, path, sent in self.asked
            if method == "GET" and path == f"/{self.bucket}/{key}"
        ]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """The server, which the environment names; copies are kept in ``tmp_path / "cache"``."""
    server_module = pytest.importorskip("moto.server", reason="pip install 'loongplug[test]'")
    pytest.importorskip("s3fs", reason="pip install 'loongplug[s3]'")
    import boto3

    from loongplug.data.object_store import _say_once, _store

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_MAX_ATTEMPTS", "1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("XDG_CACHE_HOME", str(tmp_path / "cache")),
    ):
        monkeypatch.setenv(name, value)
    for cached in (_store, _say_once):  # of the server of another test
        cached.cache_clear()
    client = boto3.client("s3")
    found = S3(client, server.stop)
    server._server.app = _noted(server._server.app, found)
    client.create_bucket(Bucket=found.bucket)
    yield found
    server.stop()
    _store.cache_clear()
    from moto.s3.models import s3_backends

    s3_backends.reset()  # all servers of a process have the same buckets


def _noted(app: Any, s3: S3) -> Any:
    lock, waiting = threading.Lock(), 0

    def noting(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        nonlocal waiting
        with lock:
            waiting += 1
            s3.most_at_once = max(s3.most_at_once, waiting)
        time.sleep(s3.pause)
        sent = list(app(environ, start_response))
        size = sum(len(part) for part in sent)
        with lock:
            waiting -= 1
            s3.asked.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], size))
        return sent

    return noting
