"""Device ids are found in dense and in sparse orders alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import MeshError
from mesh_utils.mesh import PositionTable

IDS = st.one_of(st.integers(0, 40), st.integers(0, 2**63 - 1))


@given(
    ordered=st.lists(IDS, min_size=1, max_size=30, unique=True),
    asked=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_find_is_list_index(ordered: list[int], asked: list[int]) -> None:
    table = PositionTable(np.array(ordered, np.int64))
    asked = [*asked, *ordered]
    expected = [ordered.index(i) if i in ordered else -1 for i in asked]
    assert table.find(np.array(asked, np.int64)).tolist() == expected


@pytest.mark.parametrize("ids", [[3, 1, 2], [3 * 10**9, 10**9, 2 * 10**9]])
def test_shapes_are_kept(ids: list[int]) -> None:
    table = PositionTable(np.array(ids))
    assert table.find(np.array(ids[1])).shape == ()
    assert table.find(np.array([[ids[0]], [ids[2]]])).tolist() == [[0], [2]]
    assert table.find(np.zeros((0, 4), np.int64)).shape == (0, 4)


@pytest.mark.parametrize("ids", [[3, 1, 2], [3 * 10**9, 10**9, 2 * 10**9]])
def test_has_all_and_find_all(ids: list[int]) -> None:
    table = PositionTable(np.array(ids))
    assert table.has_all(np.array(ids))
    assert not table.has_all(np.array([*ids, 7]))
    assert table.find_all(np.array(ids), "mesh").tolist() == [0, 1, 2]
    with pytest.raises(MeshError, match="The first that it does not have is 7"):
        table.find_all(np.array([*ids, 7]), "mesh")
