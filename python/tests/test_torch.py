# SPDX-License-Identifier: Apache-2.0
"""tessera.torch: values and gradients against PyTorch in float64, operator checks, compilation, autocast, streams."""
import numpy as np
import pytest
from conftest import assert_close

torch = pytest.importorskip("torch")

import eager  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tessera  # noqa: E402
import tessera.torch  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
B, NQ, NK, HQ, HK, D, DV = 2, 37, 53, 6, 2, 32, 24


@pytest.fixture(params=DEVICES)
def device(request):
    torch.manual_seed(3)
    return request.param


def inputs(device, dtype=torch.float32, requires_grad=True):
    shapes = (B, NQ, HQ, D), (B, NK, HK, D), (B, NK, HK, DV)
    return [torch.randn(s, device=device).to(dtype).requires_grad_(requires_grad) for s in shapes]


def doubles(*tensors):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def close(x, exact, dtype=torch.float32, factor=1.0):
    assert_close(x.detach().double().cpu(), exact.detach().cpu(), str(dtype).removeprefix("torch."), factor)


OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (9, 4)}, "softcap": {"softcap": 3.0}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(device, dtype, name):
    ours = inputs(device, dtype)
    exact = doubles(*ours)
    o = tessera.torch.attention(*ours, **OPTIONS[name])
    exact_o, _ = eager.attention(*exact, **OPTIONS[name])
    d_o = torch.randn_like(o)
    o.backward(d_o)
    exact_o.backward(d_o.double())
    assert o.dtype == dtype and o.device.type == device
    close(o, exact_o, dtype)
    for x, y in zip(ours, exact):
        assert x.grad.dtype == dtype
        close(x.grad, y.grad, dtype, factor=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_usual_head_dims(device, dtype, dim):
    """More than one tile in both directions, grouped heads: the shapes for which there are fast kernels."""
    shapes = (1, 300, 4, dim), (1, 400, 2, dim), (1, 400, 2, dim)
    ours = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    exact = doubles(*ours)
    o, lse = tessera.torch.attention(*ours, causal=True, return_lse=True)
    exact_o, exact_lse = eager.attention(*exact, causal=True)
    close(o, exact_o, dtype)
    close(lse, exact_lse)
    d_o = torch.randn_like(o)
    o.backward(d_o)
    exact_o.backward(d_o.double())
    for x, y in zip(ours, exact):
        close(x.grad, y.grad, dtype)


def test_gradients_of_bias_sinks_and_lse(device):
    q, k, v = inputs(device)
    bias = torch.randn(1, HQ, NQ, NK, device=device, requires_grad=True)
    sinks = torch.randn(HQ, device=device, requires_grad=True)
    slopes = torch.rand(B, HQ, device=device)
    mask = torch.rand(B, 1, NQ, NK, device=device) < 0.8
    ours = [q, k, v, bias, sinks]
    exact = doubles(*ours)
    o, lse = tessera.torch.attention(q, k, v, bias=bias, sinks=sinks, alibi_slopes=slopes, mask=mask, return_lse=True)
    exact_o, exact_lse = eager.attention(*exact[:3], bias=exact[3], sinks=exact[4], slopes=slopes, mask=mask)
    close(lse, exact_lse)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    torch.autograd.backward([o, lse], [d_o, d_lse])
    torch.autograd.backward([exact_o, exact_lse], [d_o.double(), d_lse.double()])
    for x, y in zip(ours, exact):
        close(x.grad, y.grad, factor=3)


def test_lse_alone(device):
    ours = inputs(device)
    exact = doubles(*ours)
    tessera.torch.attention(*ours, return_lse=True)[1].sum().backward()
    eager.attention(*exact)[1].sum().backward()
    close(ours[0].grad, exact[0].grad, factor=3)
    close(ours[1].grad, exact[1].grad, factor=3)
    assert torch.all(ours[2].grad == 0)


def test_only_what_needs_a_gradient(device):
    q, k, v = inputs(device)
    k.requires_grad_(False)
    tessera.torch.attention(q, k, v).sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is not None


def test_gradient_with_zero_strides(device):
    """`.sum()` sends back one number, expanded to every place."""
    ours = inputs(device)
    exact = doubles(*ours)
    tessera.torch.attention(*ours, causal=True).sum().backward()
    eager.attention(*exact, causal=True)[0].sum().backward()
    for x, y in zip(ours, exact):
        close(x.grad, y.grad, factor=3)


def test_layouts(device):
    q, k, v = inputs(device, requires_grad=False)
    o = tessera.torch.attention(q, k, v)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    dims_first = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    for views in (heads_first, dims_first):
        assert torch.equal(tessera.torch.attention(*views), o)
    assert torch.equal(tessera.attention(q, k, v), o)
    forward, _ = tessera.forward(q, k, v)
    assert torch.equal(forward, o) and forward.device == q.device


def test_questions_are_told_apart(device):
    """Whatever a plan depends on takes part in how the operator remembers it."""
    q, k, v = inputs(device, torch.float16, requires_grad=False)
    room = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)
    unaligned = room[1:].view(q.shape).copy_(q)
    mask = torch.ones(1, 1, NQ, NK, dtype=torch.bool, device=device).tril()
    cases = [((q, k, v), {}), ((unaligned, k, v), {}), ((q, k, v), {"mask": mask}), ((q, k, v), {"bias": mask.half()}),
             ((q, k, v), {"causal": True}), ((q[:, :20], k, v), {}), ((q, k[:, :, :1], v[:, :, :1]), {}),
             ((q.float(), k.float(), v.float()), {}), ((q, k, v), {"scale": 0.5})]
    alone = []
    for arrays, options in cases:
        tessera._call.questions.kept.clear()
        alone.append(tessera.torch.attention(*arrays, **options))
    for _ in range(2):
        for (arrays, options), expected in zip(cases, alone):
            assert torch.equal(tessera.torch.attention(*arrays, **options), expected)
    assert len(tessera._call.questions.kept) == len(cases)


def test_core_backward(device):
    q, k, v = inputs(device)
    o, lse = tessera.torch.attention(q, k, v, causal=True, return_lse=True)
    d_o = torch.randn_like(o)
    o.backward(d_o)
    gradients = tessera.backward(d_o, q, k, v, o, lse, causal=True)
    for x, gradient in zip((q, k, v), gradients):
        assert torch.equal(x.grad, gradient)


def test_packed(device):
    q, k, v = (x[0].detach().requires_grad_() for x in inputs(device))
    lengths_q, lengths_k = [0, 20, NQ], [0, 31, NK]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths_q, lengths_k))
    o, lse = tessera.torch.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert o.shape == (NQ, HQ, DV) and lse.shape == (HQ, NQ)
    d_o = torch.randn_like(o)
    o.backward(d_o)
    for n in range(2):
        sq, sk = slice(*lengths_q[n:n + 2]), slice(*lengths_k[n:n + 2])
        alone = [x[s][None].detach().requires_grad_() for x, s in ((q, sq), (k, sk), (v, sk))]
        o_alone = tessera.torch.attention(*alone, causal=True)
        o_alone.backward(d_o[sq][None])
        assert torch.equal(o[sq], o_alone[0])
        for x, s, y in zip((q, k, v), (sq, sk, sk), alone):
            assert torch.equal(x.grad[s], y.grad[0])


def test_dropout(device):
    ours = inputs(device)
    exact = doubles(*ours)
    keep = torch.from_numpy(tessera.dropout_mask((B, HQ, NQ, NK), dropout_p=0.25, seed=-5 % 2**64)).to(device)
    o = tessera.torch.attention(*ours, dropout_p=0.25, seed=-5 % 2**64)
    exact_o, _ = eager.attention(*exact, keep=keep, dropout=0.25)
    close(o, exact_o)
    o.square().sum().backward()
    exact_o.square().sum().backward()
    for x, y in zip(ours, exact):
        close(x.grad, y.grad, factor=4)


def test_dropout_draws_from_the_generator(device):
    q, k, v = inputs(device, requires_grad=False)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append([tessera.torch.attention(q, k, v, dropout_p=0.5) for _ in range(2)])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1]) and not torch.equal(results[0][0], results[2][0])


def operator_arguments(device, **tensors):
    q, k, v = inputs(device)
    optional = [tensors.get(name) for name in tessera._torch_ops.OPTIONAL]
    return (q, k, v, True, True, None, -1, -1, 0.0, *optional)


def extras(device):
    return {"bias": torch.randn(1, HQ, NQ, NK, device=device, requires_grad=True),
            "sinks": torch.randn(HQ, device=device, requires_grad=True)}


@pytest.mark.parametrize("full", [False, True])
def test_opcheck(device, full):
    arguments = operator_arguments(device, **(extras(device) if full else {}))
    torch.library.opcheck(torch.ops.tessera.forward.default, arguments, atol=1e-5, rtol=1e-4)
    o, lse = torch.ops.tessera.forward(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    wanted = [True, False, True, full, full]
    torch.library.opcheck(torch.ops.tessera.backward.default,
                          (torch.randn_like(o), None, o.detach(), lse.detach(), wanted, *plain))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(device, backend):
    def loss(q, k, v, bias):
        o, lse = tessera.torch.attention(q * 0.5, k, v, bias=bias, causal=True, return_lse=True)
        return (o.sin() * o).sum() + lse.sum()

    q, k, v = inputs(device)
    bias = torch.randn(1, 1, NQ, NK, device=device, requires_grad=True)
    plain = [t.detach().clone().requires_grad_() for t in (q, k, v, bias)]
    compiled = torch.compile(loss, fullgraph=True, backend=backend)(q, k, v, bias)
    compiled.backward()
    expected = loss(*plain)
    expected.backward()
    torch.testing.assert_close(compiled, expected)
    for x, y in zip((q, k, v, bias), plain):
        torch.testing.assert_close(x.grad, y.grad)


def test_compile_with_dynamic_lengths(device):
    compiled = torch.compile(lambda q, k, v: tessera.torch.attention(q, k, v, window=(8, 8)), fullgraph=True,
                             dynamic=True, backend="aot_eager")
    for length in (17, 40, 65):
        q, k, v = (torch.randn(1, length, 2, 16, device=device) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), tessera.torch.attention(q, k, v, window=(8, 8)))


def test_autocast(device):
    q, k, v = inputs(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        o = tessera.torch.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad.dtype == torch.float32
    expected = tessera.torch.attention(*(x.bfloat16() for x in (q, k, v)))
    assert torch.equal(o, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, mode):
    """The way past autograd leads to the same kernels, compiled too."""
    q, k, v = inputs(device)
    expected = tessera.torch.attention(q, k, v, causal=True, softcap=3.0)
    assert expected.requires_grad
    compiled = torch.compile(lambda *x: tessera.torch.attention(*x, causal=True, softcap=3.0), fullgraph=True,
                             backend="aot_eager")
    with mode():
        for function in (lambda *x: tessera.torch.attention(*x, causal=True, softcap=3.0), compiled):
            o = function(q, k, v)
            assert not o.requires_grad and torch.equal(o, expected)


def test_compile_with_autocast_and_kernel(device):
    """Options that torch.compile could take for its own."""
    q, k, v = inputs(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        kernel = tessera.plan(*(x.detach().bfloat16() for x in (q, k, v))).kernel
        loss = lambda q: tessera.torch.attention(q, k, v, kernel=kernel)  # noqa: E731
        o, expected = torch.compile(loss, fullgraph=True)(q), loss(q)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_whoever_looks_on_sees_operators(device):
    """Calls pass PyTorch's dispatcher by where nobody looks on."""
    q, k, v = inputs(device)

    def step(**options):
        o = tessera.torch.attention(q, k, v, **options)
        return [o, *torch.autograd.grad(o.sum(), (q, k, v))]

    unseen = step(causal=True)
    with Seen() as seen:
        assert all(map(torch.equal, step(causal=True), unseen))
    assert {"tessera.forward.default", "tessera.backward.default"} <= set(seen.operators)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert {"tessera::forward", "tessera::backward"} <= {event.key for event in profile.key_averages()}
    batched = torch.func.vmap(lambda *x: tessera.torch.attention(*x, causal=True))
    with torch.no_grad():
        assert torch.equal(batched(q[None], k[None], v[None])[0], unseen[0])


def test_lazy_negation(device):
    """A tensor whose sign PyTorch has yet to flip lies in memory with the other one."""
    plain = torch.randn(1, 5, 2, 1, dtype=torch.complex64, device=device)  # any stride does for rows of one number
    lazy = plain.conj().imag
    assert lazy.is_neg()
    assert torch.equal(tessera.torch.attention(lazy, lazy, lazy), tessera.torch.attention(*[-plain.imag] * 3))


def test_forward_mode_is_refused(device):
    """Not taken for a derivative of 0."""
    q, k, v = inputs(device, requires_grad=False)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autograd.forward_ad.dual_level():
            assert tessera.torch.attention(q, k, v).shape == (B, NQ, HQ, DV)
            with pytest.raises(NotImplementedError, match="derivatives of attention in forward mode are not there"):
                tessera.torch.attention(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_second_derivatives_are_refused(device):
    q, k, v = inputs(device)
    (dq,) = torch.autograd.grad(tessera.torch.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of attention are not there"):
        dq.sum().backward()


def test_errors(device):
    q, k, v = inputs(device)
    with pytest.raises(ValueError, match="k: head_dim is 31 but q has 32"):
        tessera.torch.attention(q, k[..., :-1], v)
    with pytest.raises(TypeError, match="q: has type torch.complex64"):
        tessera.torch.attention(q.to(torch.complex64), k, v)
    for arrays in ((q, k.detach().cpu().numpy(), v), (q.detach().cpu().numpy(), k, v)):
        with pytest.raises(TypeError, match=": is a ndarray; must be a PyTorch tensor"):
            tessera.torch.attention(*arrays)
    with pytest.raises(TypeError, match="mask: is a list; must be a PyTorch tensor"):
        tessera.torch.attention(q, k, v, mask=[True])
    with pytest.raises(ValueError, match="seed: is 18446744073709551616; must be an integer of 64 bits"):
        tessera.torch.attention(q, k, v, dropout_p=0.5, seed=2**64)
    with pytest.raises(ValueError, match="q: has shape"):
        tessera.torch.attention(q[0, 0], k, v)
    with pytest.raises(ValueError, match="v: has shape"):
        tessera.torch.attention(q, k, v[0, 0, 0, 0])
    with pytest.raises(ValueError, match="k: has 0 dimensions; tensors have 1 to 4"):
        tessera.torch.attention(q, k[0, 0, 0, 0], v)


def test_mixed_libraries():
    q, k, v = (x.detach() for x in inputs("cpu"))
    o, _ = tessera.forward(q.numpy(), k, v)
    assert isinstance(o, np.ndarray)
    np.testing.assert_array_equal(o, tessera.torch.attention(q, k, v).numpy())


# --- GPUs only -------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
def test_device_is_that_of_all_tensors():
    q, k, v = inputs("cuda")
    with pytest.raises(ValueError, match="k: is on cpu but the call runs on cuda:0; all tensors must be there"):
        tessera.forward(q, k.cpu(), v)


@pytest.mark.gpu
def test_current_stream():
    """The inputs are written on a side stream, behind work that takes a while: only that stream's order is right."""
    q, k, v = inputs("cuda", requires_grad=False)
    expected = tessera.torch.attention(q, k, v)
    tessera.torch.attention(q, k, v)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        for target, source in zip(late, (q, k, v)):
            target.copy_(source)
        o = tessera.torch.attention(*late)
        from_core, _ = tessera.forward(*late)
    assert not stream.query()  # nothing has waited for the GPU
    stream.synchronize()
    assert torch.equal(o, expected) and torch.equal(from_core, expected)


@pytest.mark.gpu
def test_given_stream():
    q, k, v = inputs("cuda", requires_grad=False)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 20, NQ - 2], [0, 31, NK]))
    expected = tessera.forward(q[0], k[0], v[0], cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    results = tessera.forward(q[0], k[0], v[0], cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, stream=stream.cuda_stream)
    assert not stream.query() and torch.cuda.current_stream().query()
    stream.synchronize()
    for x, y in zip(results, expected):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_cuda_graph():
    q, k, v = inputs("cuda")
    d_o = torch.randn(B, NQ, HQ, DV, device="cuda")

    def step():
        return torch.autograd.grad(tessera.torch.attention(q, k, v, causal=True), (q, k, v), d_o)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for x, y in zip(captured, step()):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    q, k, v = inputs("cuda:1")
    tessera.torch.attention(q, k, v).sum().backward()
    exact = doubles(q, k, v)
    eager.attention(*exact)[0].sum().backward()
    close(q.grad, exact[0].grad, factor=3)
    assert torch.cuda.current_device() == 0
