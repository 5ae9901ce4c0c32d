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


FEW = dict(vocab_size=97, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
           decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128, block_size=8)
SELDOM = {
    # Layers that ask for no function of attention: a mask is added to scores of their own.
    "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4, pad_token_id=0),
    "xglm": lambda: transformers.XGLMConfig(vocab_size=97, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4,
                                            max_position_embeddings=128, pad_token_id=0),
    # The same in the encoder alone; layers of decoders that do not say that they are causal.
    "bigbird_pegasus": lambda: transformers.BigBirdPegasusConfig(**FEW),
    "pegasus_x": lambda: transformers.PegasusXConfig(**FEW),
    # Four keys that an indexer chooses for each query.
    "deepseek_v32": lambda: transformers.DeepseekV32Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 8}, moe_intermediate_size=48, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=8, index_topk=4, index_head_dim=16, index_n_heads=2, first_k_dense_replace=1),
    # Layers with keys of others, where only the last queries attend.
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4}, vocab_size_per_layer_input=97, global_head_dim=16,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2),
}


def made(name, implementation):
    torch.manual_seed(5)
    try:
        config = SELDOM[name]()
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("name", SELDOM)
def test_masks_of_models_that_go_their_own_way(name):
    tokens, seen = padded_batch("cpu")
    calls = [{}, {"attention_mask": seen}, {"attention_mask": seen.flip(1)}]
    results = []
    for implementation in ("eager", "tessera"):
        model = made(name, implementation)
        some = {"decoder_input_ids": tokens[:, :9]} if model.config.is_encoder_decoder else {}
        if name == "gemma4_text":
            calls += [{"logits_to_keep": 3}]
        logits = [model(input_ids=tokens, **call, **some).logits for call in calls]
        if not some:  # those that are padding see no key
            logits[1:3] = [x[call["attention_mask"].bool()] for x, call in zip(logits[1:3], calls[1:3])]
        results.append(logits)
    for x, y in zip(*results):
        torch.testing.assert_close(y, x, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_where_only_the_last_query_attends(cache):
    tokens, seen = padded_batch("cpu")
    options = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True,
                   disable_compile=True, **({"cache_implementation": cache} if cache else {}))
    for call in ({"inputs": tokens.clamp(min=3)}, {"inputs": tokens, "attention_mask": seen}):
        logits = [torch.stack(made("gemma4_text", implementation).generate(**call, **options).logits)
                  for implementation in ("eager", "tessera")]
        torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-4)


def test_a_config_of_ones_own(monkeypatch):
    """Derived from a model's, it is that model's: its masks are those for SDPA."""
    masks = []
    attention = tessera.transformers.attention
    monkeypatch.setattr(tessera.transformers, "attention", lambda *x, **o: masks.append(o["mask"]) or attention(*x, **o))
    config = type("OneOfMyOwn", (transformers.LlamaConfig,), {})(**SIZES)
    tokens, seen = padded_batch("cpu")
    transformers.LlamaForCausalLM._from_config(config, attn_implementation="tessera")(tokens, attention_mask=seen)
    assert [mask.dtype for mask in masks] == [torch.bool] * 2


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
    with pytest.raises(NotImplementedError, match=r"block_indices: has shape \[1, 1, 3, 2\]; blocks of keys that an indexer "
                       "has chosen are not there, use 'eager' or 'sdpa'"):
        tessera.transformers.attention_forward(model, x, x, x, None, block_indices=x[:, :1, :, :2].int())
    with pytest.raises(NotImplementedError, match="cache: is a object, as continuous batching passes; dynamic and "
                       "static caches work, pages only in tessera.attention and tessera.flash_attn"):
        tessera.transformers.attention_forward(model, x, x, x, None, cache=object())


def test_keys_that_are_chosen():
    """Numbers below 0 are no keys; what a mask hides stays hidden, be it said in booleans or in numbers that are added."""
    q, k, v = torch.randn(3, 2, 4, 5, 16).unbind(0)
    seen = torch.rand(2, 1, 5, 5) < 0.7
    seen |= torch.eye(5).bool()
    indices = torch.stack([torch.randperm(5)[:3] for _ in range(10)]).reshape(2, 5, 3).int()
    indices[..., 0] = torch.arange(5)
    indices[0, :, 1] = -1
    chosen = torch.zeros(2, 5, 6).bool().scatter_(-1, torch.where(indices < 0, 5, indices).long(), True)[:, None, :, :5]
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen & chosen).transpose(1, 2)
    for mask in (seen, added):
        got, _ = tessera.transformers.attention_forward(torch.nn.Module(), q, k, v, mask, indices=indices)
        torch.testing.assert_close(got, expected)
