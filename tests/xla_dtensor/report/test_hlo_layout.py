"""Bytes of arrays in their memory layouts, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_dtensor.report import HloError
from xla_dtensor.report.hlo_text import (
    HOST_SPACE,
    LaidArray,
    entry_aliases,
    entry_layouts,
    laid_arrays,
    parse_laid_shape,
)

# The text, the bytes of the elements, the bytes in memory.
BY_HAND = {
    "f32[8,128]{1,0:T(8,128)}": (4096, 4096),
    "f32[9,129]{1,0:T(8,128)}": (9 * 129 * 4, 16 * 256 * 4),
    # The minor dim is dim 0: 5 -> 8 along the rows, 300 -> 384 along the lanes, the other way.
    "f32[300,5]{0,1:T(8,128)}": (6000, 8 * 384 * 4),
    "f32[300,5]{1,0:T(8,128)}": (6000, 304 * 128 * 4),
    "bf16[5,300]{1,0:T(8,128)(2,1)}": (3000, 8 * 384 * 2),
    # Dims outside of the tile are not filled up.
    "bf16[3,5,300]{2,1,0:T(8,128)(2,1)}": (9000, 3 * 8 * 384 * 2),
    "bf16[4,256,3,4,64]{1,4,3,2,0:T(8,128)(2,1)}": (4 * 256 * 768 * 2, 4 * 3 * 4 * 64 * 256 * 2),
    "s8[3,1,7,130]{3,2,1,0:T(8,128)(4,1)}": (2730, 3 * 8 * 256),
    "pred[7]{0:T(512)}": (7, 512),
    "s8[33,1]{1,0:T(32,128)(4,1)}": (33, 64 * 128),
    # A tile of two levels, whose second one is filled up: 4 rows in pairs of 3.
    "f32[4,128]{1,0:T(4,128)(3,1)}": (2048, 6 * 128 * 4),
    # Numbers take a tile.
    "f32[]{:T(128)}": (4, 512),
    "bf16[]{:T(256)}": (2, 512),
    "pred[]{:T(512)}": (1, 512),
    # Fewer dims than the tile has.
    "f32[130]{0:T(8,128)}": (520, 8 * 256 * 4),
    # Elements of 4 bits: two in a byte only where the layout says so.
    "s4[64,128]{1,0:T(64,128)(8,1)E(4)}": (4096, 4096),
    "s4[60,100]{1,0:T(64,128)(8,1)E(4)}": (3000, 4096),
    "s4[64,128]{1,0:T(64,128)(8,1)}": (8192, 8192),
    "u2[5]{0:E(2)}": (2, 2),
    # "*" merges a dim into the next one: 3 x 100 = 300 elements in tiles of 128.
    "f32[3,100]{1,0:T(*,128)}": (1200, 384 * 4),
    "f32[10]{0:L(64)}": (40, 256),
    "s32[<=10]{0:M(8)}": (40, 48),
    # Without tiles, as on CPU.
    "f32[5,3]{1,0}": (60, 60),
    "f32[5,3]": (60, 60),
    "c64[3]{0:T(128)}": (24, 1024),
    "f8e4m3fn[5,5]{1,0:T(8,128)(4,1)}": (25, 1024),
    "f32[0,128]{1,0:T(8,128)}": (0, 0),
    "token[]": (0, 0),
}


def one(text: str) -> LaidArray:
    array = parse_laid_shape(text)
    assert isinstance(array, LaidArray)
    return array


@pytest.mark.parametrize("text", BY_HAND)
def test_bytes_by_hand(text: str) -> None:
    array = one(text)
    assert (array.bytes, array.padded_bytes) == BY_HAND[text]
    assert array.padding_bytes == array.padded_bytes - array.bytes


def test_memory_spaces() -> None:
    texts = (
        "f32[2]{0}",
        "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}",
        "f32[8]{0:T(128)S(5)}",
        "u32[]{:S(2)}",
    )
    assert [one(text).space for text in texts] == [0, 1, HOST_SPACE, 2]


@pytest.mark.parametrize("text", ["u2[5]{0:SC(1:4)}", "f32[4]{0:D(D)}", "f32[8]{0:#(u32)*(u16)}"])
def test_what_is_no_tile_no_space_and_no_width_is_not_taken_for_one(text: str) -> None:
    array = one(text)
    assert (array.space, array.tiles, array.bits) == (0, (), None)


def test_tuples_keep_their_form() -> None:
    shape = parse_laid_shape("((f32[8]{0:T(128)}, s32[]), /*index=2*/token[], u8[3]{0:T(512)})")
    assert isinstance(shape, tuple)
    assert [array.padded_bytes for array in laid_arrays(shape)] == [512, 4, 0, 512]


LINE = (
    "HloModule m, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}) }, "
    "entry_computation_layout={(bf16[5,300]{1,0:T(8,128)(2,1)}, /*index=1*/f32[]{:T(128)})->"
    "(f32[]{:T(128)}, f32[4]{0:T(128)S(5)})}, num_partitions=4\n\nENTRY %x () -> f32[] {\n}\n"
)


def test_the_first_line() -> None:
    layouts = entry_layouts(LINE)
    assert layouts is not None
    inputs, result, _ = layouts
    assert [array.padded_bytes for array in inputs] == [6144, 512]
    assert [(array.padded_bytes, array.space) for array in laid_arrays(result)] == [
        (512, 0),
        (512, HOST_SPACE),
    ]
    assert entry_aliases(LINE) == {0: 1, 2: 0}


def test_a_program_without_inputs_and_one_without_layouts() -> None:
    layouts = entry_layouts("HloModule m, entry_computation_layout={()->f32[8]{0}}")
    assert layouts is not None
    assert layouts[0] == ()
    assert entry_layouts("HloModule m") is None
    assert entry_aliases("HloModule m") == {}
    assert entry_aliases("HloModule m, input_output_alias={ {}: (3, {}, must-alias) }") == {0: 3}


def test_first_lines_that_cannot_be_read() -> None:
    with pytest.raises(HloError, match=r"layout '\(f32\[8\]'\. It names no result"):
        entry_layouts("HloModule m, entry_computation_layout={(f32[8]")
    with pytest.raises(HloError, match=r"has 2 parameters\. One of them is a tuple"):
        entry_layouts("HloModule m, entry_computation_layout={((f32[8], f32[]), f32[])->f32[]}")


def test_a_program_whose_only_parameter_is_a_tuple() -> None:
    line = (
        "HloModule m, input_output_alias={ {0}: (0, {1}, may-alias), {1}: (0, {0}, may-alias) }, "
        "entry_computation_layout={((f32[8]{0}, s32[]))->(s32[], f32[8]{0})}\n"
    )
    layouts = entry_layouts(line)
    assert layouts is not None
    assert [array.padded_bytes for array in layouts[0]] == [32, 4]
    assert entry_aliases(line) == {0: 1, 1: 0}


@pytest.mark.parametrize("order", ["0", "0,2", "1,1", "0,1,2"])
def test_a_layout_of_other_dims_is_refused(order: str) -> None:
    with pytest.raises(HloError, match=rf"f32\[2,3\] was given with the layout '{order}:T"):
        one(f"f32[2,3]{{{order}:T(8,128)}}")


TILES = st.sampled_from(["T(8,128)", "T(8,128)(2,1)", "T(32,128)(4,1)", "T(128)", "T(*,128)", ""])
DIMS = st.lists(st.integers(0, 300), min_size=1, max_size=4)


def laid(dtype: str, dims: list[int], order: list[int], tiles: str) -> LaidArray:
    extents = ",".join(map(str, dims))
    return one(f"{dtype}[{extents}]{{{','.join(map(str, order))}:{tiles}}}")


@given(DIMS, TILES, st.sampled_from(["f32", "bf16", "s8", "pred", "c128"]), st.data())
def test_layouts_only_add_and_more_elements_take_no_less(
    dims: list[int], tiles: str, dtype: str, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(dims))))
    place = data.draw(st.integers(0, len(dims) - 1))
    array = laid(dtype, dims, order, tiles)
    assert array.padding_bytes >= 0
    larger = [extent + (i == place) for i, extent in enumerate(dims)]
    assert laid(dtype, larger, order, tiles).padded_bytes >= array.padded_bytes


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_whole_tiles_need_no_padding(dims: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(dims))))
    whole = [extent * 128 for extent in dims]
    assert laid("f32", whole, order, "T(8,128)" if len(dims) > 1 else "T(128)").padding_bytes == 0
