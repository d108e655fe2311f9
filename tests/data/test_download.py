"""Downloads, from a server on this machine."""

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from expmflow.data import DataError, cifar, download, idx, load_images

CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serves `home`; the cache is a temporary folder, and no data folder is named."""
    monkeypatch.setenv("NO_PROXY", "*")
    for module in (idx, cifar):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("EXPMFLOW_DATA", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=home)) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def test_a_file_is_downloaded_once_and_told_of(home: Path, server: str, tmp_path: Path):
    (home / "x.bin").write_bytes(CONTENT)
    told: list[tuple[str, int, int]] = []
    to = tmp_path / "cache" / "deep" / "x.bin"
    assert download.download(f"{server}/x.bin", MD5, to, lambda *news: told.append(news)) == to
    assert to.read_bytes() == CONTENT
    done = [news[1] for news in told]
    assert done == sorted(done)
    assert told[-1] == ("x.bin", len(CONTENT), len(CONTENT))
    (home / "x.bin").unlink()
    assert download.download(f"{server}/x.bin", MD5, to).read_bytes() == CONTENT
    assert [path.name for path in to.parent.iterdir()] == ["x.bin"]


def test_a_failed_download_says_what_to_do(home: Path, server: str, tmp_path: Path):
    (home / "x.bin").write_bytes(CONTENT[:-1])
    cases = [
        (f"{server}/x.bin", "a file with another checksum"),
        (f"{server}/y.bin", "404"),
        ("http://127.0.0.1:9/x.bin", "no connection"),
    ]
    for url, reason in cases:
        with pytest.raises(DataError) as caught:
            download.download(url, MD5, tmp_path / "cache" / "x.bin")
        assert str(caught.value).startswith(f"Expected to download {url}, or to find its files in the folder that ")
        assert "data.dir or EXPMFLOW_DATA" in str(caught.value)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_cifar_is_unpacked_in_the_cache(home: Path, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(cifar, "ROWS", 2)
    monkeypatch.setattr(cifar, "read_batch", partial(cifar.read_batch, rows=2))
    archive = home / "c.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for number, name in enumerate(cifar.FILES):
            member = tarfile.TarInfo(f"{cifar.FOLDER}/{name}")
            member.size = 2 * cifar.RECORD
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
    monkeypatch.setattr(cifar, "HOME", f"{server}/c.tar.gz")
    monkeypatch.setattr(cifar, "PACKED", hashlib.md5(archive.read_bytes()).hexdigest())
    first = load_images("cifar10", generator=torch.Generator())
    assert first.train[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    archive.unlink()
    (tmp_path / "cache" / "cifar-10-binary.tar.gz").unlink()
    again = load_images("cifar10", generator=torch.Generator())  # the unpacked files are enough
    assert torch.equal(first.train, again.train)


def test_mnist_is_downloaded_file_by_file(home: Path, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    checksums = {}
    for name, shape in idx.SHAPES.items():
        values = torch.ones((6, *shape[1:]), dtype=torch.uint8)
        content = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.numpy().tobytes()
        packed = gzip.compress(content)
        (home / f"{name}.gz").write_bytes(packed)
        checksums[name] = (hashlib.md5(packed).hexdigest(), hashlib.md5(content).hexdigest())
        monkeypatch.setitem(idx.SHAPES, name, tuple(values.shape))
    monkeypatch.setattr(idx, "VALIDATION", 2)
    monkeypatch.setitem(idx.HOMES, "mnist", f"{server}/")
    monkeypatch.setitem(idx.CHECKSUMS, "mnist", checksums)
    data = load_images("mnist", generator=torch.Generator())
    assert [len(part) for part in (data.train, data.validation, data.test)] == [4, 2, 6]
    assert sorted(path.name for path in (tmp_path / "cache" / "mnist").iterdir()) == sorted(
        f"{name}.gz" for name in idx.SHAPES
    )
