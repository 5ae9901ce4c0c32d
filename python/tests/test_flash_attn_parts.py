# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn's bert_padding, layers.rotary and flash_attn_interface, as callers of FlashAttention use them."""
import pytest

torch = pytest.importorskip("torch")

from tessera.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402
from tessera.flash_attn.bert_padding import (index_first_axis, index_first_axis_residual,  # noqa: E402
                                             index_put_first_axis, pad_input, unpad_input,
                                             unpad_input_for_concatenated_sequences)
from tessera.flash_attn.layers.rotary import (RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_kv_,  # noqa: E402
                                              apply_rotary_emb_qkv_, apply_rotary_emb_torch)

def test_functions_are_in_flash_attn_interface_too():
    import tessera.flash_attn
    from tessera.flash_attn import flash_attn_interface
    names = [name for name in vars(tessera.flash_attn) if name.startswith("flash_attn") and name != "flash_attn_interface"]
    assert len(names) == 7 and sorted(names) == sorted(flash_attn_interface.__all__)
    assert all(getattr(flash_attn_interface, name) is getattr(tessera.flash_attn, name) for name in names)


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]])


def test_unpad_and_pad():
    x = torch.randn(4, 5, 2, 3, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, MASK)
    assert torch.equal(packed, x[MASK.bool()])
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 3, 7, 7, 10]
    assert longest == 4 and used.tolist() == [3, 4, 0, 3] and indices.tolist() == MASK.flatten().nonzero().flatten().tolist()
    padded = pad_input(packed, indices, 4, 5)
    assert torch.equal(padded, x * MASK[..., None, None])
    (padded * 2).sum().backward()
    assert torch.equal(x.grad, 2 * MASK[..., None, None].expand_as(x).float())


def test_unpad_with_room():
    x = torch.randn(4, 5, 3)
    room = torch.zeros_like(MASK)
    room[0, 3], room[2, 4] = 1, 1
    packed, indices, cu_seqlens, longest, used = unpad_input(x, MASK, room)
    assert torch.equal(packed, x[(MASK + room).bool()])
    assert cu_seqlens.tolist() == [0, 4, 8, 9, 12] and longest == 4 and used.tolist() == [3, 4, 0, 3]
    assert torch.equal(index_put_first_axis(packed, indices, 20).view(4, 5, 3), x * (MASK + room)[..., None])


def test_unpad_concatenated():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 4)
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(packed, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6 and cu_seqlens.dtype == torch.int32
    assert torch.equal(index_first_axis(x.view(18, 4), indices), packed)
    rows, same = index_first_axis_residual(x.view(18, 4), indices)
    assert torch.equal(rows, packed) and same.data_ptr() == x.data_ptr()


def test_packed_attention_of_a_padded_batch():
    """What the functions are for."""
    torch.manual_seed(2)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    q, k, v = torch.randn(3, 2, 9, 2, 16)
    (packed_q, indices, cu, longest, _), (packed_k, *_), (packed_v, *_) = (unpad_input(x, mask) for x in (q, k, v))
    o = pad_input(flash_attn_varlen_func(packed_q, packed_k, packed_v, cu, cu, longest, longest, causal=True), indices, 2, 9)
    assert torch.equal(o[:1], flash_attn_func(q[:1], k[:1], v[:1], causal=True))
    assert torch.equal(o[1:, :4], flash_attn_func(q[1:, :4], k[1:, :4], v[1:, :4], causal=True)) and not o[1, 4:].any()


def turned(x, places, cos, sin, interleaved):
    """Pair by pair, in float64; places [B,N]."""
    x = x.detach().double().clone()
    half = cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = (t.double()[places, pair][..., None] for t in (cos, sin))
        x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return x


def tables(positions=30, half=6):
    angle = torch.rand(positions, half) * 6.28
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 7, torch.tensor([3, 11])])
@pytest.mark.parametrize("inplace", [False, True])
def test_apply_rotary_emb(interleaved, offsets, inplace):
    torch.manual_seed(1)
    cos, sin = tables()
    x = torch.randn(2, 9, 3, 16)
    places = torch.arange(9) + (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets)
    expected = turned(x, places.expand(2, 9), cos, sin, interleaved)
    out = apply_rotary_emb(x, cos, sin, interleaved=interleaved, inplace=inplace, seqlen_offsets=offsets)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    if isinstance(offsets, int) and offsets == 0 and not inplace:
        assert torch.equal(out, apply_rotary_emb_torch(x, cos, sin, interleaved))


def test_apply_rotary_emb_to_packed_tokens_and_back():
    torch.manual_seed(1)
    cos, sin = tables()
    x = torch.randn(10, 3, 16, requires_grad=True)
    cu, offsets = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.tensor([5, 0, 2])
    out = apply_rotary_emb(x, cos, sin, cu_seqlens=cu, max_seqlen=6, seqlen_offsets=offsets)
    places = torch.tensor([5, 6, 7, 8, 2, 3, 4, 5, 6, 7])
    torch.testing.assert_close(out.double(), turned(x[None], places[None], cos, sin, False)[0], rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(out)
    out.backward(gradient)  # a rotation's transpose turns back
    torch.testing.assert_close(x.grad.double(), turned(gradient[None], places[None], cos, -sin, False)[0], rtol=1e-5,
                               atol=1e-5)


def whole(qkv):
    return qkv, lambda t: apply_rotary_emb_qkv_(t, *tables_of(5), interleaved=True)


def grouped(qkv):
    return qkv.flatten(2, 3), lambda t: apply_rotary_emb_qkv_(t, *tables_of(5), interleaved=True, num_heads_q=2)


def one_of_several(qkv):
    return qkv.unbind(2)[1], lambda t: apply_rotary_emb(t, *tables_of(5), interleaved=True, inplace=True)


def keys_and_values(qkv):
    return qkv[:, :, 1:], lambda t: apply_rotary_emb_kv_(t, *tables_of(5), interleaved=True)


def tables_of(seed):
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(9, 6, generator=generator) * 6.28
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("part", [whole, grouped, one_of_several, keys_and_values])
def test_in_place_with_gradients(part, leaf):
    """As in training: on a projection's output, on what unbind gives, and on a parameter itself."""
    torch.manual_seed(6)
    x = torch.randn(2, 9, 3, 2, 16, requires_grad=True)
    rows, call = part(x if leaf else x * 1.0)
    expected = rows.detach().clone()
    for turned_rows in {whole: [expected[:, :, 0], expected[:, :, 1]], grouped: [expected[:, :, :4]],
                        one_of_several: [expected], keys_and_values: [expected[:, :, 0]]}[part]:
        turned_rows[:] = apply_rotary_emb(turned_rows, *tables_of(5), interleaved=True)
    out = call(rows)
    assert torch.equal(out, expected) and torch.equal(rows, expected) and out.data_ptr() == rows.data_ptr()
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, weight)
    assert torch.count_nonzero(gradient) == weight.numel()
    # A rotation's transpose turns back: turned again, the gradient is what came in.
    rotated_back = part(gradient)[1](part(gradient)[0].clone())
    torch.testing.assert_close(rotated_back, weight, rtol=1e-4, atol=1e-4)


def test_cosines_and_sines_of_each_token():
    torch.manual_seed(7)
    x, places = torch.randn(2, 9, 3, 16), torch.stack((torch.arange(9), torch.arange(9) + 11))
    cos, sin = tables()
    out = apply_rotary_emb_torch(x, cos[places], sin[places])
    assert torch.equal(out, apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([0, 11])))


def test_rotary_embedding_module():
    torch.manual_seed(4)
    rotary = RotaryEmbedding(12, interleaved=True)
    angle = torch.outer(torch.arange(30.), 1 / 10000 ** (torch.arange(0, 12, 2) / 12))
    cos, sin = angle.cos(), angle.sin()
    qkv = torch.randn(2, 9, 3, 2, 16)
    before = qkv.clone()
    assert rotary(qkv, seqlen_offset=4) is qkv
    places = (torch.arange(9) + 4).expand(2, 9)
    for part in (0, 1):
        torch.testing.assert_close(qkv[:, :, part].double(), turned(before[:, :, part], places, cos, sin, True),
                                   rtol=1e-5, atol=1e-5)
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    q, kv = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 2, 16)
    turned_q, turned_kv = rotary(q, kv.clone(), seqlen_offset=torch.tensor([1, 2]), max_seqlen=20)
    assert torch.equal(turned_q, apply_rotary_emb(q, cos, sin, True, seqlen_offsets=torch.tensor([1, 2])))
    assert torch.equal(turned_kv, apply_rotary_emb_kv_(kv.clone(), cos, sin, True, torch.tensor([1, 2])))
    grouped = torch.randn(2, 9, 4 + 2 * 2, 16)
    out = rotary(grouped.clone(), num_heads_q=4)
    assert torch.equal(out[:, :, :6], apply_rotary_emb(grouped[:, :, :6], cos, sin, True))
    assert torch.equal(out[:, :, 6:], grouped[:, :, 6:])
    rotary._update_cos_sin_cache(40, dtype=torch.float32)  # as callers of flash_attn_with_kvcache do
    assert rotary._cos_cached.shape == rotary._sin_cached.shape == (40, 6)
    torch.testing.assert_close(rotary._cos_cached[:30], cos)


def test_scaled_rotary_embedding_keeps_products():
    """xPos: what q's scale takes away at a distance of 0, k's gives back."""
    rotary, plain = RotaryEmbedding(16, scale_base=32), RotaryEmbedding(16)
    qkv = torch.randn(1, 9, 3, 1, 16)
    scaled, usual = rotary(qkv.clone()), plain(qkv.clone())
    torch.testing.assert_close((scaled[:, :, 0] * scaled[:, :, 1]).sum(-1), (usual[:, :, 0] * usual[:, :, 1]).sum(-1))
    assert not torch.equal(scaled[:, :, 0], usual[:, :, 0])


def test_refusals():
    cos, sin = tables()
    x = torch.randn(2, 9, 3, 16)
    for message, call in {
            "cos: has shape": lambda: apply_rotary_emb(x[..., :8], cos, sin),
            "x: has shape": lambda: apply_rotary_emb(x[0], cos, sin),
            r"x: has shape \[2, 31, 1, 12\]; must be .* the 30 tokens of cos": lambda: apply_rotary_emb_torch(
                torch.zeros(2, 31, 1, 12), cos, sin),
            "seqlen_offsets: lead to positions 22 to 30; cos and sin have 30": lambda: apply_rotary_emb(
                x, cos, sin, seqlen_offsets=22),
            "seqlen_offsets: lead to positions -1 to 7; cos and sin have 30": lambda: apply_rotary_emb(
                x, cos, sin, seqlen_offsets=-1),
            "qkv: has shape": lambda: apply_rotary_emb_qkv_(x, cos, sin),
            "kv: has shape": lambda: apply_rotary_emb_kv_(x, cos, sin),
            "max_seqlen: is missing": lambda: RotaryEmbedding(12)(x, x, seqlen_offset=torch.tensor([1, 2]))}.items():
        with pytest.raises(ValueError, match=message):
            call()
