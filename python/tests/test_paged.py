# SPDX-License-Identifier: Apache-2.0
"""Keys and values in pages, by NumPy: the bits of contiguous ones, and the library's refusals as exceptions."""
import numpy as np
import pytest

import tessera
from oracle import attention as exact
from conftest import assert_close

P, B, HK, D = 16, 3, 2, 24
LENGTHS = np.array([5, 40, 33], np.int32)


@pytest.fixture
def paged(rng):
    """q, contiguous k and v, their pools with NaN where no key lies, and a shuffled table."""
    q = rng.standard_normal((B, 2, 4, D), np.float32)
    k, v = (rng.standard_normal((B, 48, HK, D), np.float32) for _ in range(2))
    pools = [np.full((11, P, HK, D), np.nan, np.float32) for _ in range(2)]
    table = rng.permutation(11)[:9].reshape(B, 3).astype(np.int32)
    for b, n in enumerate(LENGTHS):
        for j in range(n):
            pools[0][table[b, j // P], j % P], pools[1][table[b, j // P], j % P] = k[b, j], v[b, j]
    return q, k, v, *pools, table


def test_same_bits_as_contiguous(paged):
    q, k, v, k_pool, v_pool, table = paged
    o, lse = tessera.forward(q, k, v, causal=True, seqused_k=LENGTHS)
    ours = tessera.forward(q, k_pool, v_pool, causal=True, seqused_k=LENGTHS, block_table=table)
    np.testing.assert_array_equal(o, ours[0])
    np.testing.assert_array_equal(lse, ours[1])
    for b, n in enumerate(LENGTHS):
        assert_close(ours[0][b], exact(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n], causal=True)[0][0])


def test_every_form_of_table(paged):
    q, k, v, k_pool, v_pool, table = paged
    o, _ = tessera.forward(q, k_pool, v_pool, seqused_k=LENGTHS, block_table=table)
    counts = -(-LENGTHS // P)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.concatenate([row[:n] for row, n in zip(table, counts)])
    listed, _ = tessera.forward(q, k_pool, v_pool, seqused_k=LENGTHS, page_indptr=indptr, page_indices=indices)
    np.testing.assert_array_equal(o, listed)
    order = np.random.default_rng(1).permutation(11)  # V's pages elsewhere
    elsewhere = np.empty_like(v_pool)
    elsewhere[order] = v_pool
    apart, _ = tessera.forward(q, k_pool, elsewhere, seqused_k=LENGTHS, block_table=table,
                               v_block_table=order[table].astype(np.int32))
    np.testing.assert_array_equal(o, apart)


def test_left_padding(paged):
    q, k, v, k_pool, v_pool, table = paged
    leftpad = np.array([2, 17, 0], np.int32)
    ours = tessera.attention(q, k_pool, v_pool, causal=True, seqused_k=LENGTHS, block_table=table, leftpad_k=leftpad)
    for b, (pad, n) in enumerate(zip(leftpad, LENGTHS)):
        alone = tessera.attention(q[b:b + 1], k[b:b + 1, pad:n], v[b:b + 1, pad:n], causal=True)
        np.testing.assert_array_equal(ours[b], alone[0])


def test_heads_first_is_a_view(paged):
    q, _, _, k_pool, v_pool, table = paged
    o = tessera.attention(q, k_pool, v_pool, seqused_k=LENGTHS, block_table=table)
    k_hnd, v_hnd = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (k_pool, v_pool))
    np.testing.assert_array_equal(o, tessera.attention(q, k_hnd, v_hnd, seqused_k=LENGTHS, block_table=table))


def test_status_tells_of_entries_that_are_no_pages(paged):
    q, _, _, k_pool, v_pool, table = paged
    status = np.zeros(1, np.int32)
    call = {"seqused_k": LENGTHS, "block_table": table, "status": status}
    table[0, 1:] = -1, 99  # 5 keys: the second entry holds none
    tessera.forward(q, k_pool, v_pool, **call)
    assert status[0] == 0
    table[1, 2] = 11  # a pool of 11 pages
    o, _ = tessera.forward(q, k_pool, v_pool, **call)
    assert status[0] == tessera.PAGE_OUTSIDE_POOL and np.isfinite(o).all()
    table[1, 2], status[0] = 0, 4
    k_pool[0] = v_pool[0] = 0
    tessera.forward(q, k_pool, v_pool, **call)
    assert status[0] == 4  # no bit is cleared


def test_status_of_pytorch(paged):
    torch = pytest.importorskip("torch")
    q, _, _, k_pool, v_pool, table = map(torch.from_numpy, paged)
    table[2, 0] = -1
    status = torch.zeros(1, dtype=torch.int32)
    tessera.forward(q, k_pool, v_pool, seqused_k=torch.from_numpy(LENGTHS), block_table=table, status=status)
    assert int(status) == tessera.PAGE_OUTSIDE_POOL
    with pytest.raises(TypeError, match="status: is no option of attention"):
        tessera.attention(q, k_pool, v_pool, seqused_k=torch.from_numpy(LENGTHS), block_table=table, status=status)


def test_refused_status(paged):
    q, k, v, k_pool, v_pool, table = paged
    fixed = np.zeros(1, np.int32)
    fixed.flags.writeable = False
    for message, status in {"status: cannot be written; must be a writable array": fixed,
                            "status: has type i64; must be i32": np.zeros(1, np.int64),
                            r"status: has shape \[2\]": np.zeros(2, np.int32)}.items():
        with pytest.raises(ValueError, match=message):
            tessera.forward(q, k_pool, v_pool, seqused_k=LENGTHS, block_table=table, status=status)
        assert not status.any()
    with pytest.raises(ValueError, match="status: is given but there is no page table"):
        tessera.forward(q, k, v, seqused_k=LENGTHS, status=np.zeros(1, np.int32))


def test_refusals(paged):
    q, _, _, k_pool, v_pool, table = paged
    with pytest.raises(ValueError, match="seqused_k: is missing; it holds the lengths of paged keys"):
        tessera.forward(q, k_pool, v_pool, block_table=table)
    with pytest.raises(ValueError, match="block_table: has type f32; must be i32"):
        tessera.forward(q, k_pool, v_pool, seqused_k=LENGTHS, block_table=table.astype(np.float32))
    with pytest.raises(ValueError, match="seqused_k: entry 1 is 49; must be from 0 to 48"):
        tessera.forward(q, k_pool, v_pool, seqused_k=np.array([5, 49, 33], np.int32), block_table=table)
    with pytest.raises(NotImplementedError, match="k: is paged; there is no backward pass through a page table"):
        tessera.backward(q, q, k_pool, v_pool, q, np.zeros((B, 4, 2), np.float32), seqused_k=LENGTHS,
                         block_table=table)
