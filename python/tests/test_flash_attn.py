# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn against float64 (packing, defaults, refusals) and, with a GPU, against the real flash_attn."""
import pytest

torch = pytest.importorskip("torch")

import eager  # noqa: E402
from conftest import assert_close  # noqa: E402

from tessera.flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,  # noqa: E402
                                flash_attn_varlen_func)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def qkv(request):
    torch.manual_seed(1)
    return torch.randn(2, 40, 3, 4, 16, device=request.param, requires_grad=True)


def close(x, exact):
    assert_close(x.detach().cpu(), exact.detach().cpu())


def test_packings_agree(qkv):
    o, lse, nothing = flash_attn_qkvpacked_func(qkv, causal=True, window_size=(9, 0), return_attn_probs=True)
    q, k, v = qkv.unbind(2)
    exact_o, exact_lse = eager.attention(*(x.detach().double() for x in (q, k, v)), causal=True, window=(9, 0))
    assert nothing is None
    close(o, exact_o)
    close(lse, exact_lse)
    assert torch.equal(o, flash_attn_func(q, k, v, causal=True, window_size=(9, 0)))
    assert torch.equal(o, flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True, window_size=(9, 0)))
    o.sum().backward()
    assert qkv.grad.shape == qkv.shape and qkv.grad.abs().sum() > 0


def test_diagonal_ends_in_the_corner(qkv):
    q, k, v = (x.detach() for x in qkv.unbind(2))
    o = flash_attn_func(q[:, :7], k, v, 0.0, 0.3, True)
    assert torch.equal(o, flash_attn_func(q[:, :7], k, v, softmax_scale=0.3, window_size=(-1, 0)))
    close(o, eager.attention(q[:, :7].double() * 0.3 * 4, k.double(), v.double(), causal=True)[0])


def test_varlen(qkv):
    q, k, v = (x[0].detach() for x in qkv.unbind(2))
    cu = torch.tensor([0, 11, 40], dtype=torch.int32, device=qkv.device)
    o, lse, _ = flash_attn_varlen_func(q, k, v, cu, cu, 29, 29, causal=True, softcap=5.0, return_attn_probs=True)
    assert lse.shape == (4, 40)
    for begin, end in ((0, 11), (11, 40)):
        alone = flash_attn_func(*(x[None, begin:end] for x in (q, k, v)), causal=True, softcap=5.0)
        assert torch.equal(o[begin:end], alone[0])


def test_deterministic_is_passed_on(qkv, monkeypatch):
    """It allows a kernel, or forbids it; whether there is one depends on the machine."""
    import tessera.flash_attn
    asked = []
    attention = tessera.flash_attn.attention
    monkeypatch.setattr(tessera.flash_attn, "attention", lambda *x, **o: asked.append(o) or attention(*x, **o))
    q, k, v = qkv.unbind(2)
    cu = torch.tensor([0, 40], dtype=torch.int32, device=qkv.device)
    for given in ({}, {"deterministic": True}):
        calls = [lambda: flash_attn_func(q, k, v, **given), lambda: flash_attn_kvpacked_func(q, qkv[:, :, 1:], **given),
                 lambda: flash_attn_qkvpacked_func(qkv, **given),
                 lambda: flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 40, 40, **given)]
        asked.clear()
        for call in calls:
            call()
        assert [options["deterministic"] for options in asked] == [bool(given)] * 4


def test_refusals(qkv):
    q, k, v = qkv.unbind(2)
    with pytest.raises(NotImplementedError, match="return_attn_probs: is True while dropout_p is 0.1"):
        flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match="qkv: has shape"):
        flash_attn_qkvpacked_func(qkv[:, :, :2])
    with pytest.raises(ValueError, match="kv: has shape"):
        flash_attn_kvpacked_func(q, qkv)
    with pytest.raises(ValueError, match=r"window_size's left: is -2; must be -1 \(no bound\) or at least 0"):
        flash_attn_func(q, k, v, window_size=(-2, 0))
    with pytest.raises(ValueError, match="softcap: is -1; must be 0"):
        flash_attn_func(q, k, v, softcap=-1.0)


def test_alibi_counts_from_the_diagonal(qkv):
    """FlashAttention-2 adds slope * j when causal, so its LSE is larger by slope * (i + Nk - Nq), and O the same."""
    q, k, v = (x.detach() for x in qkv.unbind(2))
    q, slopes = q[:, :7], torch.tensor([0.5, 0.25, 0.1, 0.0], device=qkv.device)
    o, lse, _ = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    keys, diagonal = torch.arange(40.0, device=qkv.device), torch.arange(7.0, device=qkv.device) + 33
    theirs_o, theirs_lse = eager.attention(q.double(), k.double(), v.double(), causal=True,
                                           bias=(slopes[:, None, None] * keys).expand(4, 7, 40)[None].double())
    close(o, theirs_o)
    close(lse, theirs_lse - slopes[:, None] * diagonal)


def test_autocast(qkv):
    q, k, v = qkv.unbind(2)
    with torch.autocast(qkv.device.type, dtype=torch.bfloat16):
        o = flash_attn_func(q, k, v)
    assert torch.equal(o, flash_attn_func(*(x.bfloat16() for x in (q, k, v)))) and o.dtype == torch.bfloat16


def test_senseless_cu_seqlens(qkv):
    """Refused on the CPU; on a GPU nobody looks, and the sequences concerned are left out."""
    q, k, v = (x[0].detach() for x in qkv.unbind(2))
    cu = torch.tensor([0, 11, 99], dtype=torch.int32, device=qkv.device)
    call = lambda: flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, causal=True)  # noqa: E731
    if qkv.device.type == "cpu":
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            call()
    else:
        o = call()
        assert o[11:].abs().max() == 0
        assert torch.equal(o[:11], flash_attn_func(*(x[None, :11] for x in (q, k, v)), causal=True)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (30, 5)}, {"causal": True, "softcap": 10.0}],
                         ids=str)
def test_against_flash_attn(options):
    theirs = pytest.importorskip("flash_attn")
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 128, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (6, 2, 2))
    d_o = torch.randn_like(q)
    results = []
    for function in (flash_attn_func, theirs.flash_attn_func):
        o = function(q, k, v, **options)
        results.append((o, *torch.autograd.grad(o, (q, k, v), d_o)))
    for x, y in zip(*results):
        assert_close(x.detach().double().cpu(), y.detach().double().cpu(), "bfloat16", factor=2)
