# SPDX-License-Identifier: Apache-2.0
"""torch.func over tessera.torch: grad, vjp, jacrev, vmap, functional_call; gradients that are refused; FLOP counts."""
import pytest

torch = pytest.importorskip("torch")

import eager  # noqa: E402
from test_torch import Seen, close, inputs  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera.torch import attention  # noqa: E402

B, NQ, NK, HQ, HK, D = 2, 5, 7, 4, 2, 8


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


def small(*mapped, dtype=torch.float32):
    shapes = (B, NQ, HQ, D), (B, NK, HK, D), (B, NK, HK, D)
    return [torch.randn(*mapped, *s, dtype=dtype) for s in shapes]


def ours(q, k, v, bias=None):
    return attention(q, k, v, causal=True, bias=bias)


def exact(q, k, v, bias=None):
    return eager.attention(q, k, v, causal=True, bias=bias)[0]


def loss(function):
    return lambda *x: function(*x).square().sum()


def test_grad_vjp_and_jacrev():
    tensors = [*small(), torch.randn(1, HQ, NQ, NK)]
    doubles = [x.double() for x in tensors]
    every = (0, 1, 2, 3)
    for x, y in zip(grad(loss(ours), every)(*tensors), grad(loss(exact), every)(*doubles)):
        close(x, y, factor=3)
    o, pull = vjp(ours, *tensors)
    exact_o, exact_pull = vjp(exact, *doubles)
    d_o = torch.randn_like(o)
    for x, y in zip((o, *pull(d_o)), (exact_o, *exact_pull(d_o.double()))):
        close(x, y, factor=3)
    for x, y in zip(jacrev(ours, every)(*tensors), jacrev(exact, every)(*doubles)):
        assert x.shape == y.shape
        close(x, y, factor=3)


def test_gradients_of_several_at_once():
    """The older vmap of torch.autograd: is_grads_batched, jacobian's vectorize, gradcheck's check_batched_grad."""
    q, k, v, sinks = *(x.requires_grad_() for x in small(dtype=torch.float64)), torch.randn(HQ).requires_grad_()
    o, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    arriving = torch.randn(3, *o.shape, dtype=o.dtype), torch.randn(3, *lse.shape, dtype=lse.dtype)
    for wanted in ((q, k, v), (q, sinks)):  # sinks' are sums over the batch
        at_once = torch.autograd.grad((o, lse), wanted, arriving, is_grads_batched=True, retain_graph=True)
        for n in range(3):
            alone = torch.autograd.grad((o, lse), wanted, [x[n] for x in arriving], retain_graph=True)
            assert all(torch.equal(x[n], y) for x, y in zip(at_once, alone))
    rows = lambda q: ours(q, k, v).sum((1, 2))  # noqa: E731
    assert torch.equal(*(torch.autograd.functional.jacobian(rows, q, vectorize=flag) for flag in (False, True)))
    assert torch.autograd.gradcheck(ours, (q, k, v), fast_mode=True, check_batched_grad=True)


def test_the_operator_itself():
    q, k, v = small()
    gradient = grad(lambda q: torch.ops.tessera.forward(q, k, v, True)[0].square().sum())(q)
    assert torch.equal(gradient, grad(loss(ours))(q, k, v))


def test_gradients_of_each_sample():
    tensors = small(3)
    each = vmap(grad(loss(ours), (0, 1, 2)))(*tensors)
    for n in range(3):
        alone = grad(loss(ours), (0, 1, 2))(*(x[n] for x in tensors))
        assert all(torch.equal(x[n], y) for x, y in zip(each, alone))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(D, 3 * D)

    def forward(self, x):
        return attention(*self.project(x).chunk(3, dim=-1), causal=True)


def test_functional_call():
    layer, x = Layer(), torch.randn(B, NQ, HQ, D)
    parameters = dict(layer.named_parameters())
    gradients = grad(lambda p: functional_call(layer, p, (x,)).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad)
    samples = vmap(grad(lambda p, x: functional_call(layer, p, (x[None],)).square().sum()), (None, 0))(parameters, x)
    for name, parameter in parameters.items():
        torch.testing.assert_close(samples[name].sum(0), parameter.grad)


def used(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


# Options, and which of them are mapped; the mapped dimension of 3 is the first.
MAPPED = {
    "plain": ({}, ()),
    "bias for all": ({"bias": (1, HQ, NQ, NK)}, ()),
    "bias for each sequence": ({"bias": (B, 1, NQ, NK)}, ()),
    "bias": ({"bias": (3, 1, HQ, 1, NK)}, ("bias",)),
    "slopes": ({"alibi_slopes": (HQ,)}, ()),
    "slopes for each sequence": ({"alibi_slopes": (B, HQ)}, ()),
    "mapped slopes": ({"alibi_slopes": (3, HQ)}, ("alibi_slopes",)),
    "slopes, mapped, for each sequence": ({"alibi_slopes": (3, B, HQ)}, ("alibi_slopes",)),
    "sinks": ({"sinks": (HQ,)}, ()),
    "mapped sinks": ({"sinks": (3, HQ)}, ("sinks",)),
    "lengths": ({"seqused_k": used(3, 6)}, ()),
    "mapped lengths": ({"seqused_k": used(3, 6, 1, 7, 5, 2).view(3, 2)}, ("seqused_k",)),
    "mask": ({"mask": torch.rand(3, 1, 1, NQ, NK) < 0.7}, ("mask",)),
    "dropout": ({"dropout_p": 0.4, "seed": 9}, ()),
}


@pytest.mark.parametrize("mapped_inputs", ["qkv", "q", "kv", "v"])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_one_call_after_another(name, mapped_inputs):
    options, mapped = MAPPED[name]
    options = {key: torch.randn(x) if isinstance(x, tuple) else x for key, x in options.items()}
    tensors = {n: x if n in mapped_inputs else x[0] for n, x in zip("qkv", small(3))}
    tensors.update({key: x for key, x in options.items() if isinstance(x, torch.Tensor)})
    numbers = {key: x for key, x in options.items() if not isinstance(x, torch.Tensor)}
    dims = {key: 0 if key in mapped_inputs or key in mapped else None for key in tensors}
    wanted = [key for key in tensors if key in ("q", "k", "v", "bias", "sinks")]

    def values_and_gradients(given):
        o, pull = vjp(lambda w: attention(**given, **w, **numbers), {key: given.pop(key) for key in wanted})
        return o, pull(o)[0]

    o, gradients = vmap(values_and_gradients, (dims,))(tensors)
    for n in range(3):
        one = {key: x if dims[key] is None else x[n] for key, x in tensors.items()}
        alone, alone_gradients = values_and_gradients(one)
        assert torch.equal(o[n], alone)
        assert all(torch.equal(gradients[key][n], alone_gradients[key]) for key in wanted)


def test_vmap_of_other_places_and_packed_sequences():
    q, k, v = small(3)
    expected = torch.stack([attention(*x) for x in zip(q, k, v)])
    assert torch.equal(vmap(attention, (2, 0, 4), 1)(q.movedim(0, 2), k, v.movedim(0, 4)), expected.movedim(0, 1))
    ends_q, ends_k = used(0, 2, NQ), used(0, 3, NK)
    packed = lambda q, k, v: attention(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)  # noqa: E731
    o = vmap(packed)(q[:, 0], k[:, 0], v[:, 0])
    assert torch.equal(o, torch.stack([packed(*x) for x in zip(q[:, 0], k[:, 0], v[:, 0])]))


def test_vmap_with_scales():
    tensors, scale = small(3), torch.rand(HK) + 0.5
    scaled = lambda *x: attention(*x, k_scale=scale)  # noqa: E731
    assert torch.equal(vmap(scaled)(*tensors), torch.stack([scaled(*x) for x in zip(*tensors)]))


def test_vmap_is_one_call():
    """Where the mapped dimension can join the batch; with dropout, whose mask depends on the place there, it is three."""
    tensors = small(3)
    for options, calls in (({}, 1), ({"dropout_p": 0.5, "seed": 1}, 3)):
        with Seen() as seen:
            vmap(lambda *x: attention(*x, **options))(*tensors)
        assert seen.operators.count("tessera.forward.default") == calls


def test_randomness_of_vmap():
    q, k, v = small()
    dropped = lambda q: attention(q, k, v, dropout_p=0.5)  # noqa: E731
    twice = torch.stack([q, q])
    same, different = (vmap(dropped, randomness=kind)(twice) for kind in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropped)(twice)


def test_compiled_transforms():
    q, k, v = small(3)
    for function in (vmap(ours), vmap(grad(loss(ours), (0, 1, 2)))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(compiled, function(q, k, v))


def test_what_is_not_there_is_refused():
    q, k, v = small()
    forward_mode = "derivatives of attention in forward mode are not there; use backward mode"
    with pytest.raises(NotImplementedError, match=forward_mode):
        jvp(ours, (q, k, v), (q, k, v))
    with pytest.raises(NotImplementedError, match=forward_mode):
        jacfwd(ours)(q, k, v)
    second = "second derivatives of attention are not there"
    with pytest.raises(NotImplementedError, match=second):
        grad(lambda q: grad(loss(ours))(q, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match=f"{second}|{forward_mode}"):
        hessian(loss(ours))(q, k, v)


def test_gradients_that_nobody_gives_are_refused():
    q, k, v = small()
    slopes = torch.rand(HQ, requires_grad=True)
    sentence = ("alibi_slopes: requires a gradient, which attention does not give; pass alibi_slopes.detach\\(\\), or the "
                "same scores as a bias")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for function in (attention, compiled):
        with pytest.raises(Exception, match=sentence):  # torch.compile wraps what tracing raises
            function(q, k, v, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match=sentence):
        torch.ops.tessera.forward(q, k, v, slopes=slopes)
    with pytest.raises(NotImplementedError, match=sentence):
        grad(lambda s: attention(q, k, v, alibi_slopes=s).sum())(slopes)
    for name in ("scale", "softcap"):
        number = torch.tensor(0.5, requires_grad=True)
        with pytest.raises(NotImplementedError,
                           match=f"{name}: requires a gradient, which attention does not give; pass a number"):
            attention(q, k, v, **{name: number})
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, **{name: number}), attention(q, k, v, **{name: 0.5}))
    half = torch.tensor(0.5)
    for name in ("scale", "softcap", "dropout_p"):  # in forward mode too, where it would be 0
        sentence = f"{name}: requires a gradient, which attention does not give"
        with pytest.raises(NotImplementedError, match=sentence):
            jvp(lambda x, name=name: attention(q, k, v, seed=1, **{name: x}), (half,), (half,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=sentence):
            assert attention(q, k, v, seed=1, **{name: half}).shape == q.shape
            attention(q, k, v, seed=1, **{name: torch.autograd.forward_ad.make_dual(half, half)})
    with torch.no_grad():
        assert attention(q, k, v, alibi_slopes=slopes).shape == q.shape
    assert attention(q.requires_grad_(), k, v, alibi_slopes=slopes.detach()).requires_grad


# --- FLOPs

def count(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_flops_are_those_of_sdpa():
    q, k, v = inputs("cpu")
    for n in range(4):  # which of q, k and v need no gradient
        theirs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        mine = [x.detach().requires_grad_(i + 1 != n) for i, x in enumerate((q, k, v))]
        sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(*theirs, enable_gqa=True)  # noqa: E731
        forward = 2 * q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] * (q.shape[3] + v.shape[3])
        assert count(lambda: attention(*mine, causal=True)) == count(sdpa) == forward
        backward = count(lambda: attention(*mine).sum().backward()) - forward
        d, dv = q.shape[3], v.shape[3]
        saved = (0, d, d, dv)[n]  # the product that makes this gradient
        assert backward == forward // (d + dv) * (3 * d + 2 * dv - saved)


def test_flops_of_packed_sequences():
    q, k, v = (x[0] for x in small())
    ends_q, ends_k = used(0, 2, NQ), used(0, 3, NK)
    packed = lambda **more: attention(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **more)  # noqa: E731
    assert count(packed) == 2 * HQ * (2 * 3 + 3 * 4) * 2 * D
    assert count(lambda: packed(seqused_k=used(1, 4))) == 2 * HQ * (2 * 1 + 3 * 4) * 2 * D
    meta = [x.to("meta") for x in (q, k, v)]
    bounded = lambda: attention(*meta, cu_seqlens_q=ends_q.to("meta"), cu_seqlens_k=ends_k.to("meta"),  # noqa: E731
                                max_seqlen_q=3, max_seqlen_k=4)
    assert count(bounded) == 2 * HQ * 2 * 3 * 4 * 2 * D
