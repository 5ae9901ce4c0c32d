# SPDX-License-Identifier: Apache-2.0
"""DTensors over four processes, a mesh of 2 x 2: results and gradients are those of whole tensors, and refusals are
the same on every rank."""
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

import tessera.torch  # noqa: E402
from tessera._torch_dtensor import Range, covers, has_groups, key_heads, part_of  # noqa: E402

RANKS = 4

# Sizes, placements of q, of k and v, and options. Placements: "b" batch, "h" heads, "r" replicated, for each dimension
# of the mesh. Sizes: batch, heads, heads of k.
CASES = {
    "batch": ((4, 4, 2), "br", "br", {}),
    "batch_and_heads": ((4, 4, 2), "bh", "bh", {"causal": True}),
    "heads_and_heads": ((2, 8, 4), "hh", "hh", {"window": (5, 0)}),
    "batch_twice": ((4, 2, 2), "bb", "bb", {}),
    "whole": ((2, 2, 1), "rr", "rr", {"causal": True}),
    "keys_whole": ((4, 4, 2), "bh", "rr", {"causal": True}),
    "keys_whole_on_one": ((4, 8, 4), "hh", "hr", {}),
    "one_key_head": ((2, 4, 1), "hh", "rr", {"causal": True}),
    "parts_of_groups": ((2, 8, 2), "hh", "rr", {}),
    "uneven": ((3, 3, 3), "bh", "bh", {"causal": True}),
    "ranks_without_rows": ((2, 1, 1), "bh", "bh", {}),
    "dropout": ((4, 4, 2), "bh", "bh", {"dropout_p": 0.3, "seed": 5}),
    "dropout_of_parts": ((3, 8, 2), "hb", "rb", {"dropout_p": 0.3, "seed": 5, "batch0": 7, "head0": 3}),
}
REFUSED = {
    "tokens": ((2, 4, 4), "tr", "rr", "q: is S(1) on mesh dimension 'dp'; DTensors must be divided by batch or heads"),
    "keys_by_tokens": ((2, 4, 4), "br", "tr", "k: is S(1) on mesh dimension 'dp'; must be Shard(dim=0) or Replicate() "
                       "where q is divided by batch"),
    "keys_by_heads": ((2, 4, 4), "rr", "hr", "k: is S(2) on mesh dimension 'dp'; must be Replicate() where q is whole"),
    "parts_of_several_groups": ((1, 6, 3), "hr", "rr", "q: has 6 heads, of which 2 share one of k, and is divided so "
                                "that some rank would have parts of several groups"),
    "other_order": ((8, 1, 1), "bb", "rb", "k: has 8 in dimension 0, divided so that some rank would lack what its part"),
}


# --- who has what ----------------------------------------------------------------------------------------------------

def test_parts_are_those_of_torch_chunk():
    for count, sizes in itertools.product(range(9), ((2, 3), (3, 2), (4, 1))):
        for splits in itertools.product((False, True), repeat=2):
            for at in itertools.product(*map(range, sizes)):
                expected = torch.arange(count)
                for size, split, place in zip(sizes, splits, at):
                    if split:
                        chunks = list(expected.chunk(size)) if expected.numel() else []
                        expected = chunks[place] if place < len(chunks) else expected[:0]
                begin, end = part_of(count, sizes, splits, at)
                assert list(range(begin, end)) == expected.tolist()


def test_groups_of_heads():
    assert key_heads(Range(4, 8), 4) == (1, 2) and key_heads(Range(2, 3), 4) == (0, 1)
    assert key_heads(Range(8, 8), 4) == (2, 2)
    assert has_groups(8, 2, (2, 2), (True, True)) and has_groups(8, 4, (2, 2), (True, True))
    assert not has_groups(6, 3, (4,), (True,))
    assert covers(2, (False,), 8, (True,), 4, (4,)) and covers(4, (True,), 8, (True,), 2, (4,))
    assert not covers(2, (True,), 8, (True,), 4, (4,))


# --- four processes --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each rank found wrong, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(Path(tessera.__file__).parents[1]))
    processes = [subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], env=environment, text=True,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for rank in range(RANKS)]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(printed)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", [*CASES, *REFUSED, "tensors", "packed", "sdpa", "heads_first", "drawn_dropout",
                                  "compiled", "plain"])
def test_ranks(told, case):
    assert [ranks.get(case, "did not run") for ranks in told] == [[]] * RANKS


class Rank:
    def __init__(self, rank):
        from torch.distributed.device_mesh import init_device_mesh
        self.rank = rank
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.found = {}

    def share(self, t, placements, gradient=True):
        from torch.distributed.tensor import distribute_tensor
        shared = distribute_tensor(t.detach(), self.mesh, placements)
        return shared.requires_grad_(gradient)

    def expect(self, condition, *what):
        if not condition:
            self.case.append(" ".join(map(str, what)))

    def same(self, name, got, expected, exact=True):
        got = got.full_tensor()
        self.expect(torch.equal(got, expected) if exact else torch.allclose(got, expected, atol=1e-5), name, "differs by",
                    (got - expected).abs().max() if got.shape == expected.shape else (got.shape, expected.shape))

    def begin(self, name):
        torch.manual_seed(1)
        self.case = self.found[name] = []

    def inputs(self, sizes, q_places, k_places, heads_dim=2, tokens=(11, 13)):
        from torch.distributed.tensor import Replicate, Shard
        batch, heads, key_heads = sizes
        place = {"b": Shard(0), "h": Shard(heads_dim), "t": Shard(3 - heads_dim), "r": Replicate()}
        whole = []
        for count, length in ((heads, tokens[0]), (key_heads, tokens[1]), (key_heads, tokens[1])):
            t = torch.randn(batch, length, count, 8)
            whole.append((t if heads_dim == 2 else t.transpose(1, 2).contiguous()).requires_grad_())
        places = [[place[p] for p in text] for text in (q_places, k_places, k_places)]
        return whole, [self.share(t, its) for t, its in zip(whole, places)]

    def compare(self, whole, shared, attend, exact=True):
        """Both results and all gradients. Those of tensors that every rank has are sums over ranks."""
        results, expected = attend(*shared), attend(*whole)
        weights = [torch.randn_like(t) for t in expected]
        sum((x * w).sum() for x, w in zip(expected, weights)).backward()
        shares = [self.share(w, x.placements, False) for w, x in zip(weights, results)]
        sum((x * w).sum() for x, w in zip(results, shares)).backward()
        for name, x, y in zip(("o", "lse"), results, expected):
            self.same(name, x, y.detach())
        for place, (x, y) in enumerate(zip(shared, whole)):
            self.same(f"gradient {place}", x.grad, y.grad, exact or x.grad.placements == x.placements)

    def run_cases(self):
        for name, (sizes, q_places, k_places, options) in CASES.items():
            self.begin(name)
            whole, shared = self.inputs(sizes, q_places, k_places)
            self.compare(whole, shared, lambda q, k, v: tessera.torch.attention(q, k, v, return_lse=True, **options),
                         exact=name not in ("one_key_head", "parts_of_groups"))
        for name, (sizes, q_places, k_places, sentence) in REFUSED.items():
            self.begin(name)
            _, (q, k, v) = self.inputs(sizes, q_places, k_places, tokens=(4, 4))
            try:
                tessera.torch.attention(q, k, v)
                self.case.append("was taken")
            except ValueError as error:
                self.expect(str(error).replace("Shard(dim=1) on", "S(1) on").replace("Shard(dim=2) on", "S(2) on")
                            .startswith(sentence), error)

    def run_tensors(self):
        """Others than q, k and v: divided, whole, and plain; gradients of a bias and of sinks."""
        from torch.distributed.tensor import Replicate, Shard
        self.begin("tensors")
        whole, shared = self.inputs((4, 4, 2), "bh", "bh")
        bias, sinks = torch.randn(1, 4, 11, 13, requires_grad=True), torch.randn(4, requires_grad=True)
        whole += [bias, sinks]
        shared += [self.share(bias, [Replicate(), Shard(1)]), self.share(sinks, [Replicate(), Replicate()])]
        mask, slopes = torch.rand(4, 1, 11, 13) > 0.3, torch.rand(4)
        used = torch.tensor([13, 5, 0, 9], dtype=torch.int32)

        def attend(q, k, v, bias, sinks):
            return tessera.torch.attention(q, k, v, return_lse=True, bias=bias, sinks=sinks, mask=mask,
                                           alibi_slopes=slopes, seqused_k=used)
        self.compare(whole, shared, attend, exact=False)

    def run_packed(self):
        from torch.distributed.tensor import Replicate, Shard
        self.begin("packed")
        whole = [torch.randn(20, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        shared = [self.share(t, [Replicate(), Shard(1)]) for t in whole]
        ends = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
        self.compare(whole, shared, lambda *t: tessera.torch.attention(
            *t, return_lse=True, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=13, max_seqlen_k=13, causal=True))

    def run_other_calls(self):
        self.begin("sdpa")
        whole, shared = self.inputs((4, 4, 2), "bh", "bh", heads_dim=1)
        self.compare(whole, shared, lambda *t: [tessera.torch.scaled_dot_product_attention(
            *t, is_causal=True, enable_gqa=True)])
        self.begin("heads_first")
        whole, shared = self.inputs((4, 4, 2), "bh", "bh", heads_dim=1)
        self.compare(whole, shared, lambda *t: tessera.torch.attention(*t, return_lse=True, layout="bhnd"))
        self.begin("compiled")
        whole, shared = self.inputs((4, 4, 2), "bh", "bh")
        compiled = torch.compile(tessera.torch.attention, backend="aot_eager", fullgraph=True)
        self.compare(whole, shared, lambda *t: [compiled(*t, causal=True)])

    def run_drawn_dropout(self):
        """Each rank's generator would draw another mask: all use the first rank's."""
        import torch.distributed as distributed
        self.begin("drawn_dropout")
        _, shared = self.inputs((4, 4, 2), "br", "br")
        torch.manual_seed(self.rank)
        for call in (tessera.torch.attention,
                     torch.compile(tessera.torch.attention, backend="aot_eager", fullgraph=True)):
            o = call(*shared, dropout_p=0.5).full_tensor().detach()
            first = o.clone()
            distributed.broadcast(first, 0)
            self.expect(torch.equal(first, o), "other masks on other ranks")
            again = call(*shared, dropout_p=0.5).full_tensor().detach()
            self.expect(not torch.equal(again, o), "the same mask in every call")

    def run_plain(self):
        """Plain tensors beside DTensors."""
        self.begin("plain")
        (q, k, v), (shared_q, shared_k, shared_v) = self.inputs((4, 4, 4), "bh", "bh")
        sinks = torch.zeros(4, requires_grad=True)
        for tensors, options, sentence in (
                ((q, shared_k, shared_v), {}, "q: is a plain tensor beside DTensors"),
                ((shared_q, k, shared_v), {}, "k: is a plain tensor beside DTensors"),
                ((shared_q, shared_k, v), {}, "v: is a plain tensor beside DTensors"),
                ((shared_q, shared_k, shared_v), {"sinks": sinks}, "sinks: is a plain tensor that requires a gradient")):
            try:
                tessera.torch.attention(*tensors, **options)
                self.case.append("was taken where " + sentence)
            except TypeError as error:
                self.expect(str(error).startswith(sentence), error)


def main(folder, rank):
    import torch.distributed as distributed
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ranks = Rank(rank)
    for run in (ranks.run_cases, ranks.run_tensors, ranks.run_packed, ranks.run_other_calls, ranks.run_drawn_dropout,
                ranks.run_plain):
        try:
            run()
        except Exception as error:  # the other ranks raise it as well, or wait in vain until gloo notices
            ranks.case.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank}.json").write_text(json.dumps(ranks.found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
