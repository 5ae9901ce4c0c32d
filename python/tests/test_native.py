# SPDX-License-Identifier: Apache-2.0
"""python/native/calls.c: which tensors it takes, that it changes no bit, and how it fails."""
import threading

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from tessera import _call, _native, _torch_calls  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

needed = pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
                            reason="this PyTorch has no C interface for DLPack")


def tensors(*shape, count=3, dtype=torch.float32, device="cpu"):
    torch.manual_seed(5)
    return [torch.randn(*shape).to(device, dtype).requires_grad_() for _ in range(count)]


@needed
def test_is_there():
    assert _torch_calls._functions, f"{_native.FILE} is not beside libtessera.so; build the target tessera_python"


def leaked(transform):
    """A tensor that stood for another inside of a transform, which is over."""
    kept = []
    transform(lambda x: (kept.append(x), x.sum())[1])(torch.ones(3, 2))
    return kept[0]


ODD = {
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "zeros without memory": lambda: torch._efficientzerotensor((3,)),
    "no elements": lambda: torch.empty(0, 3),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "scalar": lambda: torch.tensor(1.0),
    "five dimensions": lambda: torch.ones(1, 1, 1, 1, 2),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "of vmap": lambda: leaked(torch.vmap),
    "of grad": lambda: leaked(torch.func.grad),
    "a number": lambda: 5,
}


@needed
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_left_to_others(name):
    """Whatever has a dispatch key that an observer could have put there, and what a plan does not take as it is."""
    assert _torch_calls._describe(torch.ones(3), ODD[name]()) is None


@needed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64,
                                   torch.uint8, torch.bool, torch.int8, torch.float8_e4m3fn], ids=str)
def test_plain_tensors_are_taken(dtype):
    t = torch.ones(3, 4).to(dtype)
    key, addresses = _torch_calls._describe(t, None, t[1:])
    assert addresses == b"".join(x.data_ptr().to_bytes(8, "little") for x in (t, t[1:]))
    assert not torch._C._dispatch_keys(t).raw_repr() & _torch_calls._OTHERS_OF_TENSORS
    assert key != _torch_calls._describe(t, None, t)[0]


@needed
def test_keys_tell_questions_apart():
    base = torch.zeros(4096, dtype=torch.uint8)
    start = -base.data_ptr() % 16
    numbers = base[start:start + 1024].view(torch.float32)
    alike = [numbers[:64].view(4, 16), numbers[64:128].view(4, 16), numbers[:64].view(4, 16).detach()]
    different = [numbers[:64].view(16, 4), numbers[:64].view(4, 16).t(), numbers[:64].view(2, 2, 16),
                 numbers[:64].view(torch.int32).view(4, 16), numbers[1:65].view(4, 16), numbers[:64].view(4, 4, 4)]
    keys = [_torch_calls._describe(t)[0] for t in alike]
    assert len(set(keys)) == 1
    assert len({keys[0], *[_torch_calls._describe(t)[0] for t in different]}) == 1 + len(different)
    one, none = alike[0], None
    assert len({_torch_calls._describe(*x)[0] for x in ((one, none), (none, one), (one,), (one, one))}) == 4


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "several": {"causal": True, "window": (9, 0), "softcap": 5.0, "scale": 0.3},
    "dropout": {"dropout_p": 0.3, "seed": 2**64 - 1, "seed_offset": 5},
    "bias": {"bias": lambda: torch.randn(1, 4, 40, 40), "sinks": lambda: torch.randn(4)},
    "packed": {"cu_seqlens_q": lambda: torch.tensor([0, 13, 35], dtype=torch.int32),
               "cu_seqlens_k": lambda: torch.tensor([0, 13, 35], dtype=torch.int32)},
}


def results(name, device, dtype, transposed):
    q, k, v = tensors(*((40, 4, 32) if name == "packed" else (2, 40, 4, 32)), dtype=dtype, device=device)
    torch.manual_seed(6)
    options = {key: value().to(device).detach().requires_grad_(key == "bias") if callable(value) else value
               for key, value in OPTIONS[name].items()}
    wanted = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) if transposed else x for x in (q, k, v))
    o, lse = tessera.torch.attention(q, k, v, return_lse=True, **options)
    gradients = torch.autograd.grad(o, wanted, torch.randn_like(o), retain_graph=True)
    through_both = torch.autograd.grad((o.sum() + lse.where(lse.isfinite(), 0).sum(),), wanted)  # dO has strides of 0
    return [o, lse, *gradients, *through_both]


@needed
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_changes_no_bit(monkeypatch, name, dtype, transposed, device):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("GPUs have no kernels for f64")
    ran = []
    run, answer = _torch_calls._run_native, _torch_calls._answer

    def answered(*arguments):
        found = answer(*arguments)
        ran.extend([1] * (found is not None))
        return found

    monkeypatch.setattr(_torch_calls, "_run_native", lambda *arguments: ran.append(1) or run(*arguments))
    monkeypatch.setattr(_torch_calls, "_answer", answered)
    ours = [results(name, device, dtype, transposed) for _ in range(2)]  # planned, and found
    assert len(ran) == 2 * 3
    monkeypatch.setattr(_torch_calls, "_describe", lambda *tensors: None)
    monkeypatch.setattr(_torch_calls, "_answer", None)
    others = results(name, device, dtype, transposed)
    assert len(ran) == 2 * 3
    for x in ours:
        assert len(x) == len(others) and all(torch.equal(a, b) for a, b in zip(x, others))


def answered_question(*inputs):
    """The question of a call that was made, which C answers from now on."""
    tessera.torch.attention(*inputs)
    return next(reversed(_call.questions.kept.values()))


@needed
@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), (2, 0)], ids=str)
def test_questions_of_before_are_answered_in_c(monkeypatch, wanted, heads_first, value_dim):
    """Both passes, with their gradients in their places, of their shapes, contiguous."""
    _call.questions.kept.clear()
    q, k = tensors(1, 24, 2, 8, count=2)
    v, d_o = tensors(1, 24, 2, value_dim, count=2)
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if heads_first else x
              for x in (q, k, v)]

    def gradients():
        return torch.autograd.grad(tessera.torch.attention(*inputs, causal=True), [inputs[n] for n in wanted], d_o)

    expected = gradients()
    used = [question.last_use for question in _call.questions.kept.values()]
    monkeypatch.setattr(_torch_calls, "_run_native", None)
    monkeypatch.setattr(_torch_calls, "_look_slowly", None)
    found = gradients()
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, expected))
    assert len(used) == 2 and all(question.last_use > max(used) for question in _call.questions.kept.values())
    assert all(len(question.idle) == 1 for question in _call.questions.kept.values())
    monkeypatch.setattr(_torch_calls, "_answer", None)
    with pytest.raises(TypeError):
        gradients()


@needed
def test_modes_of_functions_see_makers_and_leave_no_trace():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            keywords = keywords or {}
            if function is torch.empty:
                seen.append(function)
                keywords["dtype"] = torch.float64
            return function(*arguments, **keywords)

    seen = []
    q, k, v = (t.detach() for t in tensors(1, 24, 2, 8))
    expected = tessera.torch.attention(q, k, v, return_lse=True)
    with Mode():
        tessera.torch.attention(q, k, v)
    found = tessera.torch.attention(q, k, v, return_lse=True)
    assert len(seen) == 1 and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected))


@needed
def test_what_c_does_not_answer():
    q, k, v = (t.detach() for t in tensors(1, 24, 2, 8))
    question = answered_question(q, k, v)
    kind, _, threads = next(reversed(_call.questions.kept))
    answer = _torch_calls._answer
    assert type(answer(kind, threads, (q, k, v))) is tuple
    for other in (((True,), threads, (q, k, v)), (kind, threads + 1, (q, k, v)), (kind, threads, (q, k)),
                  (kind, threads, (q, k, ODD["negated"]())), (kind, threads, (q,) * 41)):
        assert answer(*other) is None
    call = question.idle.pop()
    assert answer(kind, threads, (q, k, v)) is None  # it is another thread's
    question.idle.append(call)
    question.quick, quick = None, question.quick
    assert answer(kind, threads, (q, k, v)) is None
    question.quick = quick
    for wrong in ((kind, threads), (kind, threads, q), ([], threads, (q, k, v))):
        with pytest.raises((RuntimeError, TypeError, SystemError)):
            answer(*wrong)


@needed
def test_failures_of_answers(monkeypatch):
    """All are told, and the call is there for the next."""
    q, k, v = (t.detach() for t in tensors(1, 24, 2, 8))
    expected = tessera.torch.attention(q, k, v)
    question = answered_question(q, k, v)
    call, quick = question.idle[0], question.quick

    def fails(error, match):
        with pytest.raises(error, match=match):
            tessera.torch.attention(q, k, v)
        assert question.idle == [call]

    for makers, error, match in (((0,), RuntimeError, "another number of tensors"),
                                 ((0, 0, 0), RuntimeError, "another number of tensors"),
                                 ((0, 7), RuntimeError, "is not there"),
                                 ((0, ((1,), {"dtype": 5})), TypeError, "dtype"),
                                 ((0, "text"), RuntimeError, "is not there")):
        question.quick = (*quick[:3], *makers)
        fails(error, match)
    question.quick = quick
    call._options.softcap = 3.0
    fails(ValueError, "plan: was made for")
    call._options.softcap = 0.0
    assert torch.equal(tessera.torch.attention(q, k, v), expected)


@needed
def test_streams_and_workspaces(monkeypatch):
    """As on a GPU: the stream is asked for, and a workspace is made and given back."""
    asked = []

    def stream(device):
        asked.append(device)
        return 0 if device == 3 else device

    makers = torch.empty_like, torch.empty, stream, _call.questions.kept, _call.questions.clock
    q, k, v = (t.detach() for t in tensors(1, 24, 2, 8))
    expected = tessera.torch.attention(q, k, v)
    question = answered_question(q, k, v)
    call, (idle, device, workspace, *results) = question.idle[0], question.quick
    assert (device, workspace) == (None, None)
    try:
        _native.load(torch.Tensor, *makers)
        room = _torch_calls.sized((max(call.workspace_size, 64),), torch.uint8, q.device)
        for size in (None, room):
            question.quick = (idle, 3, size, *results)
            assert torch.equal(tessera.torch.attention(q, k, v), expected)
            assert bool(call._execution.workspace) == (size is not None)
        question.quick = (idle, "no stream", room, *results)
        with pytest.raises(TypeError):
            tessera.torch.attention(q, k, v)
        assert asked == [3, 3, "no stream"] and question.idle == [call]
    finally:
        _native.load(torch.Tensor, torch.empty_like, torch.empty, _torch_calls._raw_stream, *makers[3:])


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 5, 3, 8),
    "heads first": lambda: torch.randn(2, 3, 5, 8).transpose(1, 2),
    "batches last but one": lambda: torch.randn(5, 3, 2, 8).permute(2, 0, 1, 3),
    "every second token": lambda: torch.randn(2, 10, 3, 8)[:, ::2],
    "one sequence, far apart": lambda: torch.randn(5, 3, 8).as_strided((1, 5, 3, 8), (999, 24, 8, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_contiguous(name):
    """Whatever the layout of what they belong to, with an observer and without, where a plan is made and where found."""
    q, k, v = (LAYOUTS[name]().requires_grad_() for _ in range(3))

    def strides():
        o, lse = tessera.torch.attention(q, k, v, return_lse=True)
        return [x.stride() for x in (o, lse, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))]

    shapes = [q.shape, (q.shape[0], 3, 5), q.shape, q.shape, q.shape]
    assert [strides(), strides()] == [[torch.empty(shape).stride() for shape in shapes]] * 2
    with torch.profiler.profile():
        assert strides() == [torch.empty(shape).stride() for shape in shapes]


@needed
def test_failures():
    q, k, v = tensors(40, 4, 32)
    good, bad = (torch.tensor([0, end], dtype=torch.int32) for end in (40, 41))
    lengths = {"cu_seqlens_k": good}
    for _ in range(2):
        tessera.torch.attention(q, k, v, cu_seqlens_q=good, **lengths)
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            tessera.torch.attention(q, k, v, cu_seqlens_q=bad, **lengths)
    question = next(reversed(_call.questions.kept.values()))
    call, results = question.idle[0], torch.ones(40, 4, 32)
    with pytest.raises(RuntimeError, match="another number of tensors"):
        _torch_calls._run_native(call.prepared, b"\0" * 8, 0, 0, results)
    with pytest.raises(RuntimeError, match="takes a call"):
        _torch_calls._run_native(call.prepared, b"")
    with pytest.raises(TypeError):
        _torch_calls._run_native(call.prepared, "text", 0, 0, results)
    with pytest.raises(TypeError):
        _torch_calls._run_native("text", b"", 0, 0, results)


def test_in_threads():
    """All ask the same question, each of its own numbers."""
    cases = [tensors(1, 64, 2, 16, count=4) for _ in range(4)]
    for n, case in enumerate(cases):
        for t in case:
            t.data += n
    expected = [torch.autograd.grad(tessera.torch.attention(*case[:3]), case[:3], case[3]) for case in cases]
    wrong = []

    def repeat(case, gradients):
        for _ in range(50):
            found = torch.autograd.grad(tessera.torch.attention(*case[:3]), case[:3], case[3])
            if not all(torch.equal(a, b) for a, b in zip(found, gradients)):
                wrong.append(1)

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(cases, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_observers_in_the_backward_pass_alone():
    """Whoever comes after the forward pass sees an operator; what hooks saved is asked for once."""
    q, k, v, d_o = tensors(1, 16, 2, 8, count=4)
    expected = torch.autograd.grad(tessera.torch.attention(q, k, v), (q, k, v), d_o)
    o = checkpoint(tessera.torch.attention, q, k, v, use_reentrant=False)  # refuses to be asked twice
    with torch.profiler.profile() as seen:
        found = torch.autograd.grad(o, (q, k, v), d_o)
    assert "tessera::backward" in {event.key for event in seen.key_averages()}
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    negated = torch.complex(torch.zeros_like(d_o), -d_o).detach().conj().imag  # the same numbers, by a bit
    assert negated.is_neg()
    found = torch.autograd.grad(tessera.torch.attention(q, k, v), (q, k, v), negated)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
