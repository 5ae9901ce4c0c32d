# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="tessera": small random models against eager, in logits, gradients and what they generate."""
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import tessera.transformers  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    # Gemma 2 has softcap, its own scale, and layers with a sliding window in turn with full ones.
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=8, attn_logit_softcapping=5.0,
                                                query_pre_attn_scalar=20),
    # gpt-oss has sinks.
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, sliding_window=8, num_local_experts=2,
                                                 num_experts_per_tok=1),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    tessera.transformers.register()


@pytest.fixture(params=CONFIGS)
def make_model(request):
    def make(implementation, device):
        torch.manual_seed(5)
        config = CONFIGS[request.param]()
        config._attn_implementation = implementation
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(device)
    return make


def padded_batch(device):
    tokens = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(4))
    seen = torch.ones_like(tokens)
    tokens[0, :6], seen[0, :6] = 0, 0  # on the left, as for generation
    return tokens.to(device), seen.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients(make_model, device, padded, monkeypatch):
    tokens, seen = padded_batch(device)
    results, calls = [], []
    attention = tessera.transformers.attention
    monkeypatch.setattr(tessera.transformers, "attention", lambda *x, **o: calls.append(o) or attention(*x, **o))
    for implementation in ("eager", "tessera"):
        model = make_model(implementation, device)
        assert model.config._attn_implementation == implementation
        logits = model(tokens, attention_mask=seen if padded else None).logits
        kept = logits[seen.bool()] if padded else logits
        gradients = torch.autograd.grad(kept.square().mean(), list(model.parameters()), allow_unused=True)
        results.append([kept, *gradients])
    assert len(calls) == SIZES["num_hidden_layers"]  # tessera's model came here, and only that
    names = ["logits", *(name for name, _ in model.named_parameters())]
    assert any(x is not None for x in results[0][1:])
    for name, x, y in zip(names, *results):
        assert (x is None) == (y is None), name
        if x is not None:
            torch.testing.assert_close(y, x, atol=2e-5, rtol=2e-4, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(make_model, device, cache):
    tokens, seen = padded_batch(device)
    options = dict(attention_mask=seen, max_new_tokens=12, do_sample=False)
    if cache:
        options["cache_implementation"] = cache
    generated = [make_model(implementation, device).eval().generate(tokens, **options)
                 for implementation in ("eager", "tessera")]
    assert generated[0].shape == (2, 33)
    assert torch.equal(*generated)


def test_layers_that_do_not_say_that_they_are_causal():
    """Where SDPA is refused to a decoder beside an encoder, its layers may not: its mask must not be left out."""
    results = []
    for implementation in ("eager", "tessera"):
        torch.manual_seed(5)
        config = transformers.PegasusXConfig(vocab_size=97, d_model=64, encoder_layers=1, decoder_layers=1,
                                             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
                                             decoder_ffn_dim=96, max_position_embeddings=128, block_size=8)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).eval()
        tokens, _ = padded_batch("cpu")
        results.append(model(input_ids=tokens, decoder_input_ids=tokens[:, :9]).logits)
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("version", [3, 4])
def test_flash_attention_by_its_own_name(version, monkeypatch):
    """What transformers calls where it believes FlashAttention-3 or -4 to be installed. It would ask for the package's
    distribution and for CUDA first, so the name is set behind its back."""
    from transformers import modeling_flash_attention_utils as utilities

    import tessera.flash_attn.cute
    import tessera.flash_attn_interface
    monkeypatch.setitem(sys.modules, "flash_attn_interface", tessera.flash_attn_interface)
    monkeypatch.setitem(sys.modules, "flash_attn", tessera.flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", tessera.flash_attn.cute)
    monkeypatch.setattr(utilities, "_loaded_implementation", None)
    tokens, seen = padded_batch("cpu")
    torch.manual_seed(5)
    config = CONFIGS["gpt_oss" if version == 4 else "gemma2"]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    packed = torch.cat((torch.arange(9), torch.arange(12)))[None]  # two sequences in one, which positions tell
    with pytest.raises(ImportError, match="installed"):
        model.set_attn_implementation(f"flash_attention_{version}")
    results = []
    for name in ("eager", f"flash_attention_{version}"):
        model.config._attn_implementation = name
        logits = [model(tokens, attention_mask=seen).logits[seen.bool()], model(tokens).logits]
        if name != "eager":
            logits += model(tokens[1:], position_ids=packed).logits.split([9, 12], 1)
        else:
            logits += [model(tokens[1:, :9]).logits, model(tokens[1:, 9:]).logits]
        results.append([*logits, *torch.autograd.grad(logits[0].square().mean(), list(model.parameters()), allow_unused=True)])
    for x, y in zip(*results):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(y, x, atol=2e-5, rtol=2e-4)


def test_no_mask_where_layers_say_it_all(make_model, monkeypatch):
    calls = []
    attention = tessera.transformers.attention
    monkeypatch.setattr(tessera.transformers, "attention", lambda *x, **o: calls.append(o) or attention(*x, **o))
    tokens, _ = padded_batch("cpu")
    make_model("tessera", "cpu")(tokens)
    assert any(o.get("causal") and "mask" not in o for o in calls)


def test_refusals(make_model):
    model = make_model("tessera", "cpu")
    tokens, _ = padded_batch("cpu")
    x = torch.randn(1, 4, 3, 16)
    with pytest.raises(ValueError, match="output_attentions: is True"):
        tessera.transformers.attention_forward(model, x, x, x, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match=r"sinks: has shape \[1, 4, 3, 1\]; a sink for each query is not there"):
        tessera.transformers.attention_forward(model, x, x, x, None, sinks=x[..., :1])
    with pytest.raises(NotImplementedError, match="cache: is a object, as continuous batching passes; dynamic and "
                       "static caches work, pages only in tessera.attention and tessera.flash_attn"):
        tessera.transformers.attention_forward(model, x, x, x, None, cache=object())
