"""Reading parts of safetensors files: which bytes, and what is refused of damaged files."""

from __future__ import annotations

import itertools
import json
import random
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.errors import WeightsError
from xla_dtensor.hosts.blocks import whole_block, windows
from xla_dtensor.hosts.hugging_face import save_hf
from xla_dtensor.hosts.hugging_face.files import WeightFiles


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path, {"format": "pt"})
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
        files.read("w", whole_block((4, 6)), wide[:, ::2])
    assert torch.equal(wide[:, ::2], tensor)
    assert not wide[:, 1::2].any()


@pytest.mark.parametrize(
    "part",
    [
        (slice(2, 4), slice(0, 4096)),
        (slice(0, 8), slice(1024, 2048)),
        (slice(3, 4), slice(5, 6)),
        (slice(3, 3), slice(0, 4096)),
    ],
)
def test_only_the_bytes_of_a_part_are_read(tmp_path: Path, part: Index) -> None:
    tensor = torch.randn(8, 4096).bfloat16()
    with WeightFiles(write(tmp_path / "w.safetensors", {"w": tensor})) as files:
        found = files.read("w", part, torch.empty(extents_of(part), dtype=torch.bfloat16))
        assert torch.equal(found, tensor[part])
        assert files.bytes_read == 2 * tensor[part].numel()


def test_windows_follow_one_another_and_are_small_enough() -> None:
    draw = random.Random(1)
    for _ in range(200):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(4)))
        limit = draw.randrange(4, 200)
        cut = list(windows(shape, 4, limit))
        numbers = torch.arange(prod(shape)).reshape(shape)
        assert torch.cat([numbers[part].reshape(-1) for part in cut]).equal(numbers.reshape(-1))
        assert all(prod(extents_of(part)) * 4 <= limit for part in cut)


def test_every_dtype_is_written_and_read(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16]
    dtypes += [torch.bfloat16, torch.uint32, torch.int32, torch.float32, torch.uint64, torch.int64]
    dtypes += [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.float8_e8m0fnu]
    module = torch.nn.Module()
    for dtype in dtypes:
        module.register_buffer(f"of_{str(dtype)[6:]}", torch.randint(0, 2, (3, 4)).to(dtype))
    module.register_buffer("number", torch.tensor(1.5))
    save_hf(tmp_path, module)
    tensors = module.state_dict()
    with safe_open(tmp_path / "model.safetensors", "pt") as read:
        assert set(read.keys()) == tensors.keys()
        assert all(_bytes(read.get_tensor(key)) == _bytes(t) for key, t in tensors.items())
    with WeightFiles(tmp_path) as files:
        for key, tensor in tensors.items():
            found = files.read(key, whole_block(tensor.shape), torch.empty_like(tensor))
            assert files.tensors[key].dtype == tensor.dtype
            assert _bytes(found) == _bytes(tensor)


def test_a_file_that_is_cut_short_or_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", {"a": torch.ones(4), "b": torch.ones(2, 3)})
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")

    def refused(text: str = r"w\.safetensors.* damaged, cut short, or no") -> None:
        with pytest.raises(WeightsError, match=text):
            WeightFiles(path)

    for cut in (0, 5, 8, 20, 8 + length, len(good) - 1):
        path.write_bytes(good[:cut])
        refused()
    path.write_bytes(good + b"\0")
    refused()
    changes = [(b'"F32"', b'"F64"'), (b"[2,3]", b"[2,2]"), (b'{"__', b'["__'), (b"[0,", b"[1,")]
    for old, new in [*changes, (b"[2,3]", b'[2,"'), (b'"F32"', b'"F31"')]:
        path.write_bytes(good.replace(old, new, 1))
        refused()
    header = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    refused(r"'a' with dtype='F6_E2M3'\. It cannot be read as a tensor of torch")
    path.write_bytes(good.replace(b'"F32"', b'"U32"'))
    assert WeightFiles(path).tensors["a"].dtype == torch.uint32


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
