"""Where tensors lie inside a block's buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poros.blocks.layout import ALIGNMENT_BYTES, BlockLayout, align, make_layout
from poros.interfaces import TensorSpec

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    dtypes = st.sampled_from(DTYPES)
    specs = draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=6))
    return make_layout(TensorSpec(name=f"t{i}", dtype=d, shape=s) for i, (d, s) in enumerate(specs))


@given(layouts())
def test_every_tensor_starts_at_a_256_byte_boundary(layout: BlockLayout) -> None:
    assert ALIGNMENT_BYTES == 256
    assert all(entry.offset % 256 == 0 for entry in layout.entries)
    assert layout.num_bytes % 256 == 0


@given(layouts())
def test_tensors_do_not_overlap_and_lie_inside_the_buffer(layout: BlockLayout) -> None:
    ends = [entry.offset + entry.spec.num_bytes for entry in layout.entries]
    starts = [entry.offset for entry in layout.entries]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= layout.num_bytes


@given(layouts())
def test_views_have_the_stated_dtypes_and_shapes(layout: BlockLayout) -> None:
    views = layout.views(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    for entry in layout.entries:
        view = views[entry.spec.name]
        assert (view.dtype, tuple(view.shape)) == (entry.spec.dtype, entry.spec.shape)


def test_a_view_shares_the_buffer_s_memory() -> None:
    layout = make_layout([TensorSpec(name="a", dtype=torch.float32, shape=(3, 5))])
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.views(buffer)["a"].fill_(1.5)
    assert torch.equal(layout.views(buffer)["a"], torch.full((3, 5), 1.5))
    assert layout.views(buffer)["a"].data_ptr() == buffer.data_ptr()


def test_a_larger_buffer_is_fine_and_its_rest_stays_untouched() -> None:
    layout = make_layout([TensorSpec(name="a", dtype=torch.uint8, shape=(300,))])
    buffer = torch.full((layout.num_bytes + 256,), 7, dtype=torch.uint8)
    layout.views(buffer)["a"].zero_()
    assert buffer[300:].eq(7).all()


def test_a_scalar_takes_one_boundary() -> None:
    layout = make_layout([TensorSpec(name=n, dtype=torch.float32, shape=()) for n in "ab"])
    assert [entry.offset for entry in layout.entries] == [0, 256]


@pytest.mark.parametrize(("num_bytes", "aligned"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_align_rounds_up(num_bytes: int, aligned: int) -> None:
    assert align(num_bytes) == aligned


def test_the_fingerprint_changes_with_name_dtype_shape_and_order() -> None:
    a = TensorSpec(name="a", dtype=torch.float32, shape=(2, 3))
    b = TensorSpec(name="b", dtype=torch.float32, shape=(6,))
    others = [
        [b, a],
        [a],
        [TensorSpec(name="c", dtype=torch.float32, shape=(2, 3)), b],
        [TensorSpec(name="a", dtype=torch.int32, shape=(2, 3)), b],
        [TensorSpec(name="a", dtype=torch.float32, shape=(3, 2)), b],
    ]
    prints = {make_layout(specs).fingerprint() for specs in [[a, b], *others]}
    assert len(prints) == 6
