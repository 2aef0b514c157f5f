"""The size of a download, asked of an index on this machine and read from reports."""

from __future__ import annotations

import hashlib
import http.server
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.download_size import (
    MEASURED,
    Download,
    SizeUnknownError,
    add_up,
    format_bytes,
    measured,
)

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "sizeprobe-1.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: sizeprobe\nVersion: 1.0\n"


def make_wheel() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        wheel.writestr("sizeprobe-1.0.dist-info/METADATA", METADATA)
        wheel.writestr(
            "sizeprobe-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("sizeprobe-1.0.dist-info/RECORD", "")
    return content.getvalue()


class Index(http.server.BaseHTTPRequestHandler):
    """A package index of one project. The JSON form says that its wheel has 1,500,000,000 bytes."""

    as_json = True
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind, content = "application/octet-stream", b""
        if self.path.endswith(".metadata"):
            content = METADATA
        elif self.path.endswith(".whl"):
            content = make_wheel()
        elif self.as_json:
            kind, content = "application/vnd.pypi.simple.v1+json", self.json_page()
        else:
            kind, content = "text/html", f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def json_page(self) -> bytes:
        hashes = {"sha256": hashlib.sha256(METADATA).hexdigest()}
        file = {
            "filename": WHEEL,
            "url": f"/files/{WHEEL}",
            "hashes": {},
            "size": 1_500_000_000,
            "core-metadata": hashes,
            "dist-info-metadata": hashes,
        }
        page = {"meta": {"api-version": "1.1"}, "name": "sizeprobe", "files": [file]}
        return json.dumps(page).encode()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(params=["json", "html"])
def index(request: pytest.FixtureRequest) -> Iterator[tuple[str, type[Index]]]:
    handler = type("Handler", (Index,), {"as_json": request.param == "json", "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/simple", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_asks_the_index(index: tuple[str, type[Index]]) -> None:
    url, handler = index
    if handler.as_json and int(importlib.metadata.version("pip").split(".")[0]) < 26:
        pytest.skip("pip before 26 downloads wheels in a dry run")
    options = ["--isolated", "--no-cache-dir", "--index-url", url]
    done = subprocess.run(
        [sys.executable, "tools/download_size.py", *options, "sizeprobe"],
        cwd=ROOT,
        env={"PATH": "", "no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    if handler.as_json:
        assert done.stdout == "Download: 1.5 GB in 1 file.\n"
    else:
        assert done.stdout == "Download: of unknown size, since the package index does not tell.\n"
    assert not [path for path in handler.asked if path.endswith(".whl")]


def remote(name: str) -> dict[str, object]:
    return {"download_info": {"url": f"https://index/{name}", "archive_info": {}}}


def test_adds_up(tmp_path: Path) -> None:
    local = tmp_path / "local+cpu.whl"
    local.write_bytes(b"x" * 7)
    on_disk = {"download_info": {"url": local.as_uri(), "archive_info": {}}}
    folder = {"download_info": {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}}
    report = {"install": [remote("a.whl"), remote("b%2Bcu.whl"), on_disk, folder]}
    download = add_up(report, {"a.whl": 3_000, "b+cu.whl": 2_000_000, "other.whl": 1})
    assert download == Download(2, 2_003_000, 1, 7)
    assert download.text() == "2.0 MB in 2 files, and 7 bytes that lie on disk already"


def test_unknown_size_is_said() -> None:
    with pytest.raises(SizeUnknownError, match=r"a\.whl"):
        add_up({"install": [remote("a.whl")]}, {})


def test_nothing_to_download() -> None:
    assert add_up({"install": []}, {}).text() == "nothing"


def test_every_environment_was_measured() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for extras in MEASURED:
        assert f".[{extras}]" in makefile
        assert measured(["-e", f".[{extras}]"]).startswith(f"about {MEASURED[extras]}")
    assert set(re.findall(r"-e \.\[(.+?)\]", makefile)) == set(MEASURED)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 bytes"), (1_234, "1.2 kB"), (86_000_000, "86.0 MB"), (4_170_000_000, "4.2 GB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
