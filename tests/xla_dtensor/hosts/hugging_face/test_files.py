"""Reading parts of safetensors files: which bytes, and what is refused of damaged files."""

from __future__ import annotations

import itertools
import json
import random
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.errors import CheckpointError, WeightsError
from xla_dtensor.hosts.hugging_face.files import WeightFiles
from xla_dtensor.hosts.hugging_face.format import DTYPE_NAMES, header_bytes, read_header
from xla_dtensor.hosts.hugging_face.windows import whole, windows


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    listed = [(key, t.dtype, tuple(t.shape)) for key, t in tensors.items()]
    data = b"".join(_bytes(t) for t in tensors.values())
    path.write_bytes(header_bytes(listed, {"format": "pt"}) + data)
    return path


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_part(shape: tuple[int, ...], draw: random.Random) -> Index:
    bounds = [sorted(draw.choices(range(size + 1), k=2)) for size in shape]
    return tuple(
        slice(a, b) if draw.random() < 0.7 else slice(0, n)
        for (a, b), n in zip(bounds, shape, strict=True)
    )


def test_any_part_of_any_tensor_has_the_values_of_the_whole(tmp_path: Path) -> None:
    draw = random.Random(0)
    shapes = [(), (0,), (7,), (5, 3), (4, 0, 2), (3, 4, 5), (2, 3, 2, 4), (3, 3000), (6, 2, 5000)]
    tensors = {
        f"{i}.{dtype}": torch.randint(0, 2, shape).to(dtype)
        for (i, shape), dtype in itertools.product(
            enumerate(shapes), (torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn)
        )
    }
    with WeightFiles(write(tmp_path / "w.safetensors", tensors)) as files:
        for key, tensor in tensors.items():
            assert files.tensors[key].shape == tuple(tensor.shape)
            for _ in range(12):
                part = random_part(tuple(tensor.shape), draw)
                for dtype in (tensor.dtype, torch.float32):
                    out = torch.empty(extents_of(part), dtype=dtype)
                    found = files.read(key, part, out)
                    assert found is out
                    assert torch.equal(found.float(), tensor.float()[part]), (key, part)


def test_a_part_that_does_not_lie_together_in_memory_is_filled(tmp_path: Path) -> None:
    tensor = torch.arange(24).reshape(4, 6)
    wide = torch.zeros(4, 12, dtype=torch.int64)
    with WeightFiles(write(tmp_path / "w.safetensors", {"w": tensor})) as files:
        files.read("w", whole((4, 6)), wide[:, ::2])
    assert torch.equal(wide[:, ::2], tensor)
    assert not wide[:, 1::2].any()


@pytest.mark.parametrize(
    ("part", "num_bytes"),
    [
        ((slice(2, 4), slice(0, 4096)), 2 * 8192),
        # Gaps of 6144 bytes between runs of 2048 bytes are not read.
        ((slice(0, 8), slice(1024, 2048)), 8 * 2048),
        # Gaps of 2048 bytes are less than a page, and are.
        ((slice(0, 8), slice(0, 3072)), 8 * 8192),
        ((slice(3, 4), slice(5, 6)), 2),
        ((slice(3, 3), slice(0, 4096)), 0),
    ],
)
def test_only_the_bytes_of_a_part_are_read(tmp_path: Path, part: Index, num_bytes: int) -> None:
    tensor = torch.randn(8, 4096).bfloat16()
    with WeightFiles(write(tmp_path / "w.safetensors", {"w": tensor})) as files:
        found = files.read("w", part, torch.empty(extents_of(part), dtype=torch.bfloat16))
        assert torch.equal(found, tensor[part])
        assert files.bytes_read == num_bytes


def test_windows_follow_one_another_and_are_small_enough() -> None:
    draw = random.Random(1)
    for _ in range(200):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(4)))
        limit = draw.randrange(4, 200)
        cut = list(windows(shape, 4, limit))
        numbers = torch.arange(prod(shape)).reshape(shape)
        assert torch.cat([numbers[part].reshape(-1) for part in cut]).equal(numbers.reshape(-1))
        assert all(prod(extents_of(part)) * 4 <= limit for part in cut)


def test_the_package_safetensors_reads_and_writes_the_same(tmp_path: Path) -> None:
    package: Any = pytest.importorskip("safetensors.torch")
    tensors = {
        name: torch.randint(0, 2, (3, 4)).to(dtype)
        for dtype, name in DTYPE_NAMES.items()
        if dtype not in (torch.float8_e8m0fnu,)
    }
    tensors["scalar"] = torch.tensor(1.5)
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    read = package.load_file(write(tmp_path / "ours.safetensors", tensors))
    assert read.keys() == tensors.keys()
    assert all(_bytes(read[key]) == _bytes(t) for key, t in tensors.items())
    package.save_file(tensors, tmp_path / "theirs.safetensors")
    with WeightFiles(tmp_path / "theirs.safetensors") as files:
        for key, t in tensors.items():
            found = files.read(key, whole(t.shape), torch.empty(t.shape, dtype=t.dtype))
            assert _bytes(found) == _bytes(t)


def test_a_file_that_is_cut_short_or_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", {"a": torch.ones(4), "b": torch.ones(2, 3)})
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    for cut in (0, 5, 8, 20, 8 + length, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(WeightsError, match=r"w\.safetensors.* damaged, cut short, or no"):
            read_header(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(CheckpointError, match="its header describes"):
        read_header(path)
    for old, new in (
        (b'"F32"', b'"F64"'),
        (b"[2,3]", b"[2,2]"),
        (b'{"__', b'["__'),
        (b"[16,40]", b"[17,41]"),
        (b"[2,3]", b'[2,"'),
    ):
        path.write_bytes(good.replace(old, new, 1))
        with pytest.raises(WeightsError, match=r"were to be read\. .* Get the file again"):
            read_header(path)
    for kind, said in ((b'"F31"', "'F31'"), (b"[123]", "'\\[123\\]'")):
        path.write_bytes(good.replace(b'"F32"', kind, 1))
        with pytest.raises(WeightsError, match=rf"'a' with dtype={said}\. torch has no such dtype"):
            read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", {"a": torch.ones(4000)})
    with WeightFiles(path) as files:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(WeightsError, match=r"ends at byte 1000: it was cut short while"):
            files.read("a", whole((4000,)), torch.empty(4000))


def test_folders_indices_and_files_are_found(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nowhere", tmp_path / "no.json"):
        with pytest.raises(WeightsError, match=r"has to be downloaded first"):
            WeightFiles(missing)
    write(tmp_path / "x1.safetensors", {"a": torch.ones(2)})
    write(tmp_path / "x2.safetensors", {"b": torch.ones(3)})
    assert WeightFiles(tmp_path).tensors.keys() == {"a", "b"}
    assert WeightFiles(tmp_path / "x2.safetensors").tensors.keys() == {"b"}
    write(tmp_path / "x3.safetensors", {"b": torch.ones(3)})
    with pytest.raises(WeightsError, match=r"Both x2.safetensors and x3.safetensors have 'b'"):
        WeightFiles(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "x3.safetensors"}}))
    assert WeightFiles(tmp_path).tensors.keys() == {"b"}
    assert WeightFiles(index).tensors["b"].file.name == "x3.safetensors"
    for weight_map, text in (
        ({"b": "x4.safetensors"}, r"names the file 'x4.safetensors'. It is not there"),
        ({"bb": "x3.safetensors"}, r"says that 'x3.safetensors' has 'bb'. .* it has 'b'"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(WeightsError, match=text):
            WeightFiles(tmp_path)
    index.write_text("{")
    with pytest.raises(WeightsError, match="no readable weight_map"):
        WeightFiles(tmp_path)
    write(tmp_path / "model.safetensors", {"c": torch.ones(3)})
    assert WeightFiles(tmp_path).tensors.keys() == {"c"}
