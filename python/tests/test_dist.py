# SPDX-License-Identifier: Apache-2.0
"""tessera.dist: ranks as threads against one process; bits where they are promised."""
import threading

import numpy as np
import pytest

import tessera
import tessera.dist
from conftest import relative_error

LENGTHS, HEADS, KV_HEADS, DIM = (192, 0, 64), 4, 2, 16
TOKENS = sum(LENGTHS)
ENDS = np.cumsum([0, *LENGTHS]).astype(np.int32)


def numbers(seed=3):
    rng = np.random.default_rng(seed)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [rng.standard_normal((TOKENS, h, DIM), dtype=np.float32) for h in shapes]


def one_process(**options):
    q, k, v, d_o = numbers()
    options = dict(options, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
    o, lse = tessera.forward(q, k, v, **options)
    wanted = ("dq", "dk", "dv") + (("dsinks",) if "sinks" in options else ())
    return o, lse, tessera.backward(d_o, q, k, v, o, lse, gradients=wanted, **options)


def on_threads(ranks, body):
    """body(communicator) of each rank, in a thread of its own; what they return or raise, by rank."""
    results = [None] * ranks

    def run(communicator):
        try:
            results[communicator.rank] = body(communicator)
        except Exception as error:
            results[communicator.rank] = error
    all_threads = [threading.Thread(target=run, args=(c,)) for c in tessera.dist.threads(ranks)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    return results


def both_passes(communicator, partition, scheme="gather", segment=0, **options):
    sharing = tessera.dist.Sharing(communicator, partition, scheme, segment, timeout=60)
    q, k, v, d_o = (partition.shard(x, communicator.rank) for x in numbers())
    o, lse = tessera.dist.forward(q, k, v, sharing, threads=1, **options)
    gradients = tessera.dist.backward(d_o, q, k, v, o, lse, sharing, threads=1, **options)
    return o, lse.T, gradients.dq, gradients.dk, gradients.dv, gradients.dsinks


def whole(partition, results):
    """Arrays of all tokens, from what every rank returned."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [partition.unshard([np.asarray(r[i]) for r in results]) for i in range(5)]


@pytest.mark.parametrize("scheme, kind, slices", [("gather", "zigzag", 1), ("ring", "balanced", 1),
                                                  ("gather", "contiguous", 2)])
def test_threads_give_one_process_answer(scheme, kind, slices):
    options = dict(causal=True, dropout_p=0.1, seed=9, sinks=np.linspace(-1, 1, HEADS, dtype=np.float32))
    o, lse, gradients = one_process(**options)
    partition = tessera.dist.Partition(LENGTHS, 4, kind, slices=slices, align=16, causal=True)
    results = on_threads(4, lambda c: both_passes(c, partition, scheme, **options))
    for got, expected in zip(whole(partition, results), (o, lse.T, gradients.dq, gradients.dk, gradients.dv)):
        assert relative_error(got, expected) < 2e-6
    for result in results:
        assert relative_error(result[5], gradients.dsinks) < 2e-6


@pytest.mark.parametrize("scheme, slices", [("ring", 1), ("gather", 2)])
def test_the_gradient_of_a_bias(scheme, slices):
    longest = max(LENGTHS)
    bias = np.random.default_rng(5).standard_normal((len(LENGTHS), HEADS, longest, longest), dtype=np.float32)
    q, k, v, d_o = numbers()
    options = dict(causal=True, bias=bias, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
    o, lse = tessera.forward(q, k, v, **options)
    expected = tessera.backward(d_o, q, k, v, o, lse, gradients=("dbias",), **options).dbias
    rows = np.concatenate([bias[b, :, :n].swapaxes(0, 1) for b, n in enumerate(LENGTHS)])  # [tokens, heads, longest]
    partition = tessera.dist.Partition(LENGTHS, 4, slices=slices, align=16, causal=True)

    def run(communicator):
        sharing = tessera.dist.Sharing(communicator, partition, scheme, timeout=60)
        q, k, v, d_o, mine = (partition.shard(x, communicator.rank) for x in (*numbers(), rows))
        options = dict(causal=True, threads=1, bias=mine.swapaxes(0, 1)[None])
        o, lse = tessera.dist.forward(q, k, v, sharing, **options)
        gradients = tessera.dist.backward(d_o, q, k, v, o, lse, sharing, dbias=True, **options)
        return np.asarray(gradients.dbias)[0].swapaxes(0, 1)
    got = partition.unshard(on_threads(4, run))
    for b, n in enumerate(LENGTHS):
        begin = sum(LENGTHS[:b])
        assert n == 0 or relative_error(got[begin:begin + n, :, :n], expected[b, :, :n, :n].swapaxes(0, 1)) < 2e-6


def test_autograd_of_a_bias():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(48, 2, 16, generator=generator) for _ in range(3))
    weight = torch.randn(48, 2, 16, generator=generator)
    biases = [torch.linspace(-1, 1, 2 * 48 * 48).reshape(1, 2, 48, 48).requires_grad_() for _ in range(2)]
    sharing = tessera.dist.Sharing(tessera.dist.threads(1)[0], tessera.dist.Partition([48], 1))
    (tessera.dist.attention(q, k, v, sharing, causal=True, bias=biases[0]) * weight).sum().backward()
    (tessera.attention(q[None], k[None], v[None], causal=True, bias=biases[1])[0] * weight).sum().backward()
    assert relative_error(biases[0].grad.numpy(), biases[1].grad.numpy()) < 2e-6


def test_the_last_few_plans_are_kept():
    """Documents of other lengths in each step need as many plans, and each keeps the steps of all ranks."""
    partitions = [tessera.dist.Partition([n, 40 - n], 2, align=1) for n in range(1, 40)]

    def run(communicator):
        first = None
        for partition in [*partitions, partitions[0]]:
            q = np.ones((partition.rows(communicator.rank), 1, 8), np.float32)
            sharing = tessera.dist.Sharing(communicator, partition, timeout=60)
            o, lse = tessera.dist.forward(q, q, q, sharing, threads=1)
            first = lse if first is None else first
        np.testing.assert_array_equal(lse, first)
        return len(communicator._plans)
    assert on_threads(2, run) == [16, 16]


def test_bits_do_not_depend_on_the_ranks():
    answers = []
    for ranks in (1, 2, 4):
        partition = tessera.dist.Partition(LENGTHS, ranks, align=32)
        answers.append(whole(partition, on_threads(ranks, lambda c: both_passes(c, partition, segment=32, causal=True))))
    for answer in answers[1:]:
        for got, expected in zip(answer, answers[0]):
            np.testing.assert_array_equal(got, expected)


def test_a_partition_of_ones_own():
    spans = [[(0, 100, 192)], [(2, 0, 64), (0, 0, 100)]]
    partition = tessera.dist.Partition(LENGTHS, 2, spans=spans)
    assert partition.rows(0) == 92 and partition.spans(1) == [(2, 0, 64), (0, 0, 100)]
    x = np.arange(TOKENS)
    np.testing.assert_array_equal(partition.shard(x, 1), [*range(192, 256), *range(100)])
    np.testing.assert_array_equal(partition.unshard([partition.shard(x, r) for r in range(2)]), x)
    lse = np.arange(2 * TOKENS).reshape(2, TOKENS)
    np.testing.assert_array_equal(partition.unshard([partition.shard(lse, r, 1) for r in range(2)], 1), lse)


@pytest.mark.parametrize("scheme", ["ring", "gather"])
def test_spans_without_rows(scheme):
    """Every document cut in four at the same shares, as ring-flash-attention does, with documents shorter than that."""
    lengths = (3, 1, 0, 150)
    cuts = [[round(n * share / 4) for share in range(5)] for n in lengths]
    spans = [[(b, cut[c], cut[c + 1]) for b, cut in enumerate(cuts) for c in (rank, 3 - rank)] for rank in range(2)]
    assert sum(begin == end for of in spans for _, begin, end in of) > 4
    q, k, v = (np.random.default_rng(2).standard_normal((sum(lengths), 2, 16), dtype=np.float32) for _ in range(3))
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    o, lse = tessera.forward(q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)
    partition = tessera.dist.Partition(lengths, 2, spans=spans)
    assert [partition.spans(rank) for rank in range(2)] == spans

    def run(communicator):
        sharing = tessera.dist.Sharing(communicator, partition, scheme, timeout=60)
        return tessera.dist.forward(*(partition.shard(x, communicator.rank) for x in (q, k, v)), sharing, causal=True)
    results = on_threads(2, run)
    assert relative_error(partition.unshard([r[0] for r in results]), o) < 2e-6
    assert relative_error(partition.unshard([r[1] for r in results], 1), lse) < 2e-6


def test_refusals():
    with pytest.raises(ValueError, match="^kind: is 'round'; must be one of zigzag, contiguous, balanced$"):
        tessera.dist.Partition([8], 2, "round")
    with pytest.raises(ValueError, match="^slices: is 3; must be positive and divide the 4 ranks$"):
        tessera.dist.Partition([8], 4, slices=3)
    with pytest.raises(ValueError, match="^spans: are those of 1 ranks; must be of 2$"):
        tessera.dist.Partition([8], 2, spans=[[(0, 0, 8)]])
    with pytest.raises(ValueError, match="^partition: holds row 7 of sequence 0 not at all; every row must be held once$"):
        tessera.dist.Partition([8], 1, spans=[[(0, 0, 7)]])
    partition = tessera.dist.Partition([64], 1)
    x = np.ones((64, 2, 8), np.float32)
    sharing = tessera.dist.Sharing(tessera.dist.threads(1)[0], partition)
    with pytest.raises(ValueError, match="^scheme: is 'star'; must be one of ring, gather$"):
        tessera.dist.forward(x, x, x, sharing._replace(scheme="star"))
    with pytest.raises(ValueError, match=r"^q: has shape \[1, 64, 2, 8\]; must be \[rows, heads, dim\]$"):
        tessera.dist.forward(x[None], x, x, sharing)
    with pytest.raises(ValueError, match=r"^v: has the shape \[63,2,8\]; must have \[64,2,8\], the rows of this rank$"):
        tessera.dist.forward(x, x, x[1:], sharing)
    with pytest.raises(tessera.dist.CommunicationError, match="^communicator: has failed before "):
        tessera.dist.forward(x, x, x, sharing)
    with pytest.raises(ValueError, match="^seed: is missing"):
        tessera.dist.forward(x, x, x, sharing, dropout_p=0.5)


def test_decoding_over_ranks():
    rng = np.random.default_rng(4)
    lengths = [150, 70]
    q = rng.standard_normal((2, 1, HEADS, DIM), dtype=np.float32)
    k, v = (rng.standard_normal((2, 150, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))

    def run(communicator):
        decoder = tessera.dist.Decoder(communicator, HEADS, KV_HEADS, DIM, block=16, groups=8, causal=True, threads=1)
        mine = [np.zeros((2, decoder.rows(150), KV_HEADS, DIM), np.float32) for _ in range(2)]
        for position in range(150):
            rank, row = decoder.place(position)
            if rank == communicator.rank:
                for cache, x in zip(mine, (k, v)):
                    cache[:, row] = x[:, position]
        return decoder.forward(q, *mine, lengths)
    exact = tessera.forward(q, k, v, causal=True, seqused_k=np.array(lengths, np.int32))
    results = [result for ranks in (1, 2, 3) for result in on_threads(ranks, run)]
    assert len(results) == 6
    for o, lse in results:
        np.testing.assert_array_equal(o, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    assert relative_error(results[0][0], exact[0]) < 2e-6 and relative_error(results[0][1], exact[1]) < 2e-6
    with pytest.raises(ValueError, match="^groups: is 3; must be a power of two$"):
        tessera.dist.Decoder(tessera.dist.threads(1)[0], HEADS, KV_HEADS, DIM, groups=3)
    with pytest.raises(ValueError, match="^kernel: is 'avx2'; over several ranks the library chooses it$"):
        tessera.dist.Decoder(tessera.dist.threads(1)[0], HEADS, KV_HEADS, DIM, kernel="avx2")


def test_ranks_that_differ_are_told():
    partition = tessera.dist.Partition(LENGTHS, 2)
    results = on_threads(2, lambda c: both_passes(c, partition, causal=c.rank == 0))
    for result in results:
        assert isinstance(result, tessera.dist.CommunicationError)
        assert str(result) == "causal differs: rank 0 has 1, rank 1 has 0"


def test_a_transport_in_python():
    boxes, lock = {}, threading.Lock()

    class Mail:
        def __init__(self, rank):
            self.rank, self.ranks, self.down = rank, 2, False

        def start(self, group):
            if self.down:
                raise OSError("the post is on strike")
            self.group, self.done = group, [message.send for message in group]
            with lock:
                for message in group:
                    if message.send:
                        boxes.setdefault((self.rank, message.peer), []).append(bytes(message.memory))

        def test(self):
            with lock:
                for i, message in enumerate(self.group):
                    if not self.done[i] and boxes.get((message.peer, self.rank)):
                        memoryview(message.memory).cast("B")[:] = boxes[message.peer, self.rank].pop(0)
                        self.done[i] = True
            return self.done

        def notice(self):
            return boxes.get("failure")

        def fail(self, sentence):
            boxes["failure"] = sentence

    def both(down):
        results = [None, None]
        partition = tessera.dist.Partition(LENGTHS, 2, align=16)

        def run(rank):
            mail = Mail(rank)
            mail.down = down and rank == 1
            try:
                results[rank] = both_passes(tessera.dist.Communicator(mail), partition, causal=True)
            except Exception as error:
                results[rank] = error
        pair = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        return partition, results
    partition, results = both(False)
    assert relative_error(whole(partition, results)[0], one_process(causal=True)[0]) < 2e-6
    _, results = both(True)
    assert [str(error) for error in results] == ["rank 1: the post is on strike", "the post is on strike"]
