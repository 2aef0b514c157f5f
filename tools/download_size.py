"""Says how much `pip install` is about to download, before it does.

    python tools/download_size.py -e ".[jax]" "torch>=2.13,<2.14"

takes the arguments of `pip install`, prints one line, installs nothing and never fails: it is a
courtesy of the Makefile. It needs pip 26 or newer; an older pip downloads even in a dry run.

pip resolves the arguments in a dry run, inside this process, with the index and the options that
it is set up with. An index that speaks the JSON form of the simple API tells the size of each file
and serves metadata apart from the wheels, so the dry run downloads no wheel and the sizes need only
be remembered as pip reads them. An index of the older HTML form tells neither: there pip would
download every wheel just to resolve. The dry run is then stopped at the first wheel, and the line
gives the size measured when this file was last edited.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURED_ON = "2026-11-25, Linux x86-64"
# Extras of this project -> what their environment in the Makefile downloads, with PyTorch's CUDA
# build.
MEASURED = {
    "jax": "3.1 GB",
    "jax,dev": "3.0 GB",
    "jax,preflight,dev": "3.5 GB",
    "torch-xla": "4.2 GB",
    "jax,torch-xla,preflight,dev": "4.6 GB",
    "tpu": "3.4 GB",
    "cuda12,dev": "4.6 GB",
    "cuda13,dev": "3.5 GB",
    "docs": "54 MB",
}


class SizeUnknownError(Exception):
    """The index does not tell how large its files are."""


@dataclass(frozen=True)
class Download:
    """What an installation would fetch: files of an index, and wheels that already lie on disk."""

    num_remote: int
    remote_bytes: int
    num_local: int
    local_bytes: int

    def text(self) -> str:
        """One line for a person."""
        if not self.num_remote and not self.num_local:
            return "nothing"
        line = f"{format_bytes(self.remote_bytes)} in {format_files(self.num_remote)}"
        if self.num_local:
            line += f", and {format_bytes(self.local_bytes)} that lie on disk already"
        return line


def format_bytes(num_bytes: int) -> str:
    """A size in the decimal units that pip shows, such as '1.2 GB'."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def format_files(num_files: int) -> str:
    """'1 file' or '12 files'."""
    return f"{num_files} file{'' if num_files == 1 else 's'}"


def add_up(report: dict[str, Any], sizes: dict[str, int]) -> Download:
    """Adds up the files of an installation report.

    Args:
        report: What `pip install --report` wrote.
        sizes: File name to bytes, as the index gave them.

    Returns:
        The counts and bytes of remote and local files. Folders, such as an editable project, count
        for nothing.

    Raises:
        SizeUnknownError: When a remote file is not in `sizes`.
    """
    remote: list[int] = []
    local: list[int] = []
    for item in report["install"]:
        download_info = item["download_info"]
        if "archive_info" not in download_info:
            continue
        url = urllib.parse.urlsplit(download_info["url"])
        name = urllib.parse.unquote(url.path.rpartition("/")[2])
        if url.scheme == "file":
            local.append(os.stat(urllib.request.url2pathname(url.path)).st_size)
        elif name in sizes:
            remote.append(sizes[name])
        else:
            raise SizeUnknownError(name)
    return Download(len(remote), sum(remote), len(local), sum(local))


def resolve(pip_arguments: Sequence[str]) -> Download:
    """Resolves the arguments with pip's own dry run and adds up the files.

    Raises:
        SizeUnknownError: When the index tells no sizes, or pip's insides have changed.
    """
    sizes: dict[str, int] = {}
    try:
        _listen_to_pip(sizes)
        from pip._internal.cli.main import main
    except (ImportError, AttributeError) as error:
        raise SizeUnknownError("this version of pip cannot be listened to") from error
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        silent = io.StringIO()
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            status = main(["install", "-qqq", "--dry-run", "--report", str(report), *pip_arguments])
        if status != 0:
            raise SizeUnknownError("pip's dry run did not end well")
        return add_up(json.loads(report.read_text(encoding="utf-8")), sizes)


def _listen_to_pip(sizes: dict[str, int]) -> None:
    """Notes the sizes that pip reads from the index, and stops pip at the first wheel.

    pip has no public call for either. The two hooks only listen or stop: they change no result.
    """
    from pip._internal.exceptions import InstallationError
    from pip._internal.models.link import Link
    from pip._internal.network.download import Downloader

    read_link = Link.from_json.__func__
    download = Downloader.__call__

    def from_json(cls: Any, file_data: dict[str, Any], page_url: str) -> Any:
        if isinstance(file_data.get("size"), int):
            sizes[file_data["filename"]] = file_data["size"]
        return read_link(cls, file_data, page_url)

    def stop_at_wheel(self: Any, link: Any, location: str) -> Any:
        if link.filename.endswith(".metadata"):
            return download(self, link, location)
        raise InstallationError(f"{link} is not downloaded just to learn its size")

    Link.from_json = classmethod(from_json)  # pyright: ignore[reportAttributeAccessIssue]
    Downloader.__call__ = stop_at_wheel


def measured(pip_arguments: Sequence[str]) -> str:
    """The size measured for this project's extras, from a table."""
    for argument in pip_arguments:
        extras = re.fullmatch(r"\.\[(.*)\]", argument)
        if extras and extras[1] in MEASURED:
            return f"about {MEASURED[extras[1]]}, as measured on {MEASURED_ON}"
    return "of unknown size, since the package index does not tell"


def main(pip_arguments: Sequence[str]) -> None:
    """Prints the one line."""
    try:
        text = resolve(pip_arguments).text()
    except SizeUnknownError:
        text = measured(pip_arguments)
    print(f"Download: {text}.", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
