# SPDX-License-Identifier: Apache-2.0
"""Values that have no place in the C ABI: each is refused by name, none is cut off, ignored or computed with."""
import math

import numpy as np
import pytest

import tessera

X = np.random.default_rng(3).standard_normal((1, 4, 2, 8)).astype(np.float32)


def pieces():
    o, lse = tessera.forward(X, X, X)
    return X, X, X, X, o, lse


# --- integers

# Every option that is an integer: how it is given, what the sentence calls it, and its bits.
INTEGERS = {
    "window's left": (lambda n: {"window": (n, -1)}, 64),
    "window's right": (lambda n: {"window": (-1, n)}, 64),
    "alignment": (lambda n: {"causal": True, "alignment": n}, 64),
    **{name: (lambda n, name=name: {name: n}, 64)
       for name in ("row0", "col0", "head0", "batch0", "max_seqlen_q", "max_seqlen_k")},
    "threads": (lambda n: {"threads": n}, 32),
}
CALLS = {
    "attention": lambda **options: tessera.attention(X, X, X, **options),
    "forward": lambda **options: tessera.forward(X, X, X, **options),
    "backward": lambda **options: tessera.backward(*pieces(), **options),
    "plan": lambda **options: tessera.plan(X, X, X, **options),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_do_not_fit(call, name):
    give, bits = INTEGERS[name]
    for value in (2**(bits - 1), -2**(bits - 1) - 1, 2**bits, 2**bits + 3, -2**bits - 3, 2**200):
        with pytest.raises(ValueError) as raised:
            CALLS[call](**give(value))
        assert str(raised.value) == f"{name}: is {value}; must be an integer of {bits} bits"
    for value in (1.0, "1", None, [1], np.ones(2), math.nan):
        if value is None and name != "alignment":
            continue  # where None has a meaning, it is the default; the others are below
        with pytest.raises((TypeError, ValueError)) as raised:
            CALLS[call](**give(value))
        assert str(raised.value).startswith(name), raised.value


@pytest.mark.parametrize("name", ["row0", "threads", "seed_offset"])
def test_none_where_it_has_no_meaning(name):
    with pytest.raises(TypeError, match=f"{name}: is None; must be an integer"):
        tessera.attention(X, X, X, **{name: None})


def test_an_integer_too_long_to_print():
    with pytest.raises(ValueError, match="row0: is an integer of 16610 bits; must be an integer of 64 bits"):
        tessera.attention(X, X, X, row0=10**5000)


@pytest.mark.parametrize("name", ["seed", "seed_offset"])
def test_seeds(name):
    options = {"dropout_p": 0.5, "seed": 1}
    for value in (2**64, -2**63 - 1):
        with pytest.raises(ValueError, match=f"{name}: is {value}; must be an integer of 64 bits"):
            tessera.attention(X, X, X, **{**options, name: value})
        with pytest.raises(ValueError, match=f"{name}: is {value}; must be an integer of 64 bits"):
            tessera.dropout_mask((1, 2, 4, 4), **{**options, name: value})
    # The same 64 bits with a sign and without, and as NumPy's number.
    for same in (2**64 - 5, np.uint64(2**64 - 5), np.int64(-5)):
        for call in (lambda **o: tessera.attention(X, X, X, **o), lambda **o: tessera.dropout_mask((1, 2, 4, 4), **o)):
            np.testing.assert_array_equal(call(**{**options, name: same}), call(**{**options, name: -5}))


def test_integers_outside_the_options():
    o, lse = tessera.forward(X, X, X)
    with pytest.raises(ValueError, match="threads: is 4294967297; must be an integer of 32 bits"):
        tessera.merge([(o, lse)], threads=2**32 + 1)
    with pytest.raises(ValueError, match="row0: is 18446744073709551616; must be an integer of 64 bits"):
        tessera.dropout_mask((1, 2, 4, 4), dropout_p=0.5, seed=1, row0=2**64)
    for stream in (2**64, -1):
        with pytest.raises(ValueError, match=f"stream: is {stream}; must be an integer of 64 bits, 0 or more"):
            tessera.forward(X, X, X, stream=stream)
        with pytest.raises(ValueError, match=f"stream: is {stream}; must be an integer of 64 bits, 0 or more"):
            tessera.backward(*pieces(), stream=stream)
    with pytest.raises(TypeError, match="stream: is 'x'; must be an integer"):
        tessera.forward(X, X, X, stream="x")


def test_sizes_and_strides_of_what_is_only_imagined():
    from tessera import _abi, _call
    for shape, strides, told in (((1, 2**63), (1, 1), "o's size: is 9223372036854775808"),
                                 ((1, 2), (2**64, 1), "o's stride: is 18446744073709551616")):
        with pytest.raises(ValueError, match=told):
            _call.tensor("o", _call.View(0, _abi.F32, _abi.CPU, 0, shape, strides))


def test_every_integer_of_a_struct_is_checked():
    """Whoever fills in a struct, by whatever way: operators of PyTorch come without the options' checks."""
    from tessera import _abi
    checked = 0
    for struct in _abi._STRUCTS:
        for name, kind in struct._fields_:
            if kind in _abi._INTEGERS:
                checked += 1
                with pytest.raises(ValueError, match=f"^{name}: is {2**64 + 3}; must be an integer of "):
                    _abi.make(struct, **{name: 2**64 + 3})
    assert checked >= 25


def test_numpy_numbers_are_numbers():
    expected = tessera.attention(X, X, X, causal=True, window=(2, 1), scale=0.5, row0=3)
    got = tessera.attention(X, X, X, causal=np.True_, window=(np.uint8(2), np.int64(1)), scale=np.float32(0.5),
                            row0=np.array(3))
    np.testing.assert_array_equal(got, expected)


# --- numbers, flags, names

@pytest.mark.parametrize("name, told", [("scale", "scale"), ("softcap", "softcap"), ("dropout_p", "dropout_p")])
def test_numbers(name, told):
    more = {"seed": 1} if name == "dropout_p" else {}
    for value in (math.nan, math.inf, -math.inf, np.float32("nan")):
        with pytest.raises(ValueError, match=f"^{told}: is -?(nan|inf); "):
            tessera.attention(X, X, X, **{name: value}, **more)
    for value in ("0.5", b"0.5", bytearray(b"0.5"), 1j, [0.5], np.ones(2)):
        with pytest.raises(TypeError, match=f"^{name}: is .*; must be a number$"):
            tessera.attention(X, X, X, **{name: value}, **more)
    with pytest.raises(ValueError, match=f"^{name}: is an integer beyond the range of floating-point numbers$"):
        tessera.attention(X, X, X, **{name: 10**400}, **more)


@pytest.mark.parametrize("name", ["causal", "deterministic"])
def test_flags(name):
    for value in ("False", "", "0", None, 2, -1, 0.5, math.nan, [], [False], np.array([True, False]), object()):
        with pytest.raises(TypeError, match=f"^{name}: is .*; must be True or False$"):
            tessera.attention(X, X, X, **{name: value})
    for false, true in ((False, True), (0, 1), (np.False_, np.True_), (np.array(0), np.array(True))):
        np.testing.assert_array_equal(tessera.attention(X, X, X, **{name: false}),
                                      tessera.attention(X, X, X, **{name: False}))
        np.testing.assert_array_equal(tessera.attention(X, X, X, **{name: true}),
                                      tessera.attention(X, X, X, **{name: True}))


def test_kernels():
    for value in ("reference\0junk", "\0", "reference\0"):
        with pytest.raises(ValueError, match="kernel: is .*; must not hold the character of code 0"):
            tessera.attention(X, X, X, kernel=value)
    with pytest.raises(ValueError, match="kernel: is .*; must be text that UTF-8 can hold"):
        tessera.attention(X, X, X, kernel="\udc80")
    for value in (b"reference", 3, ["reference"]):
        with pytest.raises(TypeError, match="kernel: is .*; must be a kernel's name"):
            tessera.attention(X, X, X, kernel=value)
    with pytest.raises(ValueError, match="kernel: is ''; must be one of "):  # None is what leaves the choice open
        tessera.attention(X, X, X, kernel="")


# --- things that can be read once

def test_generators():
    q, k, v, d_o, o, lse = X, X, X, X, *tessera.forward(X, X, X)
    expected = tessera.backward(d_o, q, k, v, o, lse, gradients=["dq", "dv"])
    got = tessera.backward(d_o, q, k, v, o, lse, gradients=(name for name in ("dq", "dv")))
    assert got.dk is None and got.dbias is None
    np.testing.assert_array_equal(got.dq, expected.dq)
    np.testing.assert_array_equal(got.dv, expected.dv)
    with pytest.raises(ValueError, match="gradients: holds 'dx'; must be of dq, dk, dv, dbias, dsinks"):
        tessera.backward(d_o, q, k, v, o, lse, gradients=(name for name in ("dq", "dx")))
    with pytest.raises(ValueError, match="gradients: holds 3; must be of "):
        tessera.backward(d_o, q, k, v, o, lse, gradients=[3])
    with pytest.raises(TypeError, match="gradients: is None; must be names of dq, dk, dv, dbias, dsinks"):
        tessera.backward(d_o, q, k, v, o, lse, gradients=None)

    merged = tessera.merge(part for part in [(o, lse), (o, lse)])
    np.testing.assert_array_equal(merged[0], tessera.merge([(o, lse), (o, lse)])[0])
    with pytest.raises(ValueError, match="partials: is empty"):
        tessera.merge(iter(()))
    with pytest.raises(TypeError, match=r"partials\[1\]: is a ndarray; must be a pair \(O, LSE\)"):
        tessera.merge([(o, lse), o])


# --- arrays that are more than their numbers

def test_masked_arrays():
    with pytest.raises(TypeError, match="k: is a masked array; must be a plain one"):
        tessera.attention(X, np.ma.masked_array(X, mask=X > 0), X)


def test_tensors_that_have_no_memory():
    torch = pytest.importorskip("torch")
    from tessera.torch import attention
    real = torch.from_numpy(X)
    meta = real.to("meta")
    o, lse = attention(real, real, real, return_lse=True)
    arrays = {"q": real, "k": real, "v": real}
    more = {"bias": torch.zeros(1, 1, 4, 4), "mask": torch.ones(1, 1, 4, 4, dtype=torch.bool), "sinks": torch.zeros(2),
            "alibi_slopes": torch.zeros(2), "seqused_k": torch.tensor([3], dtype=torch.int32)}
    for name in (*arrays, *more):
        for grad in (False, True):
            given = {n: x.clone().requires_grad_(grad) for n, x in arrays.items()}
            given.update({name: more[name]} if name in more else {})
            given[name] = given[name].detach().to("meta")
            with pytest.raises(ValueError, match="is on .* but q is on .*; all tensors must be on one device"):
                attention(**given)
        with pytest.raises(TypeError, match="is on meta; must be on cpu or cuda"):
            tessera.forward(**given)
    saved = {"d_o": real, "d_lse": None, "o": o, "lse": lse}
    for name in ("d_o", "o", "lse"):
        given = {**saved, name: saved[name].to("meta")}
        with pytest.raises(ValueError, match=f"{name}: is on meta but q is on cpu; all tensors must be on one device"):
            torch.ops.tessera.backward(*given.values(), [True, True, True, False, False], real, real, real)
    # All of them without memory: that is how PyTorch asks for shapes, and what comes back has none either.
    o, lse = attention(meta, meta, meta, return_lse=True)
    assert o.is_meta and o.shape == meta.shape and lse.is_meta and lse.shape == (1, 2, 4)


def test_tensors_without_strides():
    torch = pytest.importorskip("torch")
    real = torch.from_numpy(X)
    jagged = torch.nested.nested_tensor([real[0, :3], real[0]], layout=torch.jagged)
    for odd in (jagged, real.to_sparse()):
        for given in ((odd, real, real), (real, odd, real)):
            with pytest.raises(TypeError, match=r"[qk]: is nested or sparse \(torch.*\); must be a tensor with strides"):
                tessera.forward(*given)
    sparse = torch.zeros(1, 1, 4, 4).to_sparse()
    for call in (tessera.forward, tessera.attention):
        with pytest.raises(TypeError, match=r"k: is nested or sparse \(torch.sparse_coo\); must be a tensor with strides"):
            call(real, real.to_sparse(), real)
        with pytest.raises(TypeError, match=r"bias: is nested or sparse \(torch.sparse_coo\)"):
            call(real, real, real, bias=sparse)


def test_views_that_pytorch_would_change_later():
    torch = pytest.importorskip("torch")
    real = torch.from_numpy(X)
    with pytest.raises(ValueError, match="v: is a view whose sign PyTorch would change later; must be resolved"):
        tessera.forward(real, real, torch._neg_view(real))


def test_operators_of_pytorch():
    """They come without the options' checks."""
    torch = pytest.importorskip("torch")
    import tessera.torch  # noqa: F401
    real = torch.from_numpy(X)
    with pytest.raises(ValueError, match="threads: is 4294967297; must be an integer of 32 bits"):
        torch.ops.tessera.forward(real, real, real, threads=2**32 + 1)
    with pytest.raises(ValueError, match="kernel: is .*; must not hold the character of code 0"):
        torch.ops.tessera.forward(real, real, real, kernel_name="reference\0junk")
    for name, (give, bits) in INTEGERS.items():
        with pytest.raises(ValueError, match=f"{name}: is {2**bits + 3}; must be an integer of {bits} bits"):
            tessera.attention(real, real, real, **give(2**bits + 3))
