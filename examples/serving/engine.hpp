// SPDX-License-Identifier: Apache-2.0
// Continuous batching over a paged cache: sequences come and go, prompts are read in chunks beside sequences that
// decode, and all of them are one call of append and one of attention per layer.
// Included by serving.cpp. What the two calls do: docs/algorithm.md, "Append" and "Paged keys and values".
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>

#include "model.hpp"

// The free pages of a pool. A page that comes back is the next to go out, so that reuse is the rule.
class Pages {
 public:
  explicit Pages(std::int32_t count) : owners(static_cast<std::size_t>(count)), free(static_cast<std::size_t>(count)) {
    std::iota(free.rbegin(), free.rend(), 0);
  }
  std::size_t available() const { return free.size(); }
  std::int32_t take() {
    const std::int32_t page = free.back();
    free.pop_back();
    ++owners[static_cast<std::size_t>(page)];
    return page;
  }
  void give_back(const Tokens& pages) { free.insert(free.end(), pages.rbegin(), pages.rend()); }
  int most_owners() const { return *std::max_element(owners.begin(), owners.end()); }

 private:
  std::vector<int> owners;  // how many sequences have had each page
  std::vector<std::int32_t> free;
};

struct Request {
  int id;
  Tokens prompt;
  std::size_t new_tokens;
};

// What happened, for whoever watches.
struct Step {
  std::size_t decoding = 0, prompt_tokens = 0, chunks = 0;  // chunks: parts of prompts that go on in a later step
  std::size_t pages_in_use = 0;
  bool mixed() const { return decoding > 0 && prompt_tokens > 0; }
};

class Engine {
 public:
  std::map<int, Tokens> finished;

  Engine(const Model& model, std::int32_t pages, std::int64_t page_size, std::size_t tokens_per_step) :
      model(model), page_count(pages), page_size(page_size), tokens_per_step(tokens_per_step), pool(pages) {
    const auto size = static_cast<std::size_t>(pages * page_size * Model::kv_heads * Model::dim);
    for (std::size_t layer = 0; layer < Model::layers; ++layer) caches.push_back({Numbers(size), Numbers(size)});
  }

  void add(Request request) { waiting.push_back(std::move(request)); }
  bool busy() const { return !waiting.empty() || !running.empty(); }
  const Pages& pages() const { return pool; }

  // Admits what fits, computes one batch, and retires what has ended.
  Step step() {
    admit();
    const Batch batch = make_batch();
    const Numbers x = run(batch);
    Step told = describe(batch);
    for (std::size_t n = 0; n < batch.parts.size(); ++n) {
      Sequence& s = *batch.parts[n].sequence;
      s.cached += batch.parts[n].count;
      if (s.cached == s.tokens.size())  // the last row of the part is the last token's: its logits say the next one
        s.tokens.push_back(model.next_token(x, static_cast<std::size_t>(batch.ends[n + 1]) - 1));
    }
    retire();
    return told;
  }

 private:
  struct Sequence {
    int id;
    Tokens tokens;            // the prompt and what was generated
    std::size_t prompt, end;  // lengths: of the prompt, and at which it ends
    std::size_t cached = 0;   // tokens whose keys and values are in the cache
    Tokens pages{};           // in order: its row of the block table
    bool decodes() const { return cached >= prompt; }
  };
  struct Part {  // of a batch: the next `count` tokens of a sequence
    Sequence* sequence;
    std::size_t count;
  };
  struct Batch {
    std::vector<Part> parts;
    Tokens tokens, ends{0}, used, table;  // ends: cu_seqlens. used: seqused_k, these tokens counted
    std::int64_t entries = 1;             // of each row of the table
  };
  struct Cache {
    Numbers k, v;  // [pages, page_size, kv_heads, dim]
  };

  std::size_t pages_for(std::size_t tokens) const {
    return (tokens + static_cast<std::size_t>(page_size) - 1) / static_cast<std::size_t>(page_size);
  }

  // A sequence enters when the pool has pages for its whole life, those promised to others aside: none can get stuck.
  void admit() {
    std::size_t promised = 0;
    for (const Sequence& s : running) promised += pages_for(s.end) - s.pages.size();
    while (!waiting.empty()) {
      Request& r = waiting.front();
      const std::size_t end = r.prompt.size() + r.new_tokens;
      if (promised + pages_for(end) > pool.available()) return;
      promised += pages_for(end);
      running.push_back({r.id, std::move(r.prompt), 0, end});
      running.back().prompt = running.back().tokens.size();
      waiting.pop_front();
    }
  }

  // Sequences that decode come first, one token each; prompts share what is left of the step.
  Batch make_batch() {
    Batch batch;
    std::size_t left = tokens_per_step;
    for (const bool decoding : {true, false})
      for (Sequence& s : running)
        if (s.decodes() == decoding && left > 0) {
          const std::size_t count = std::min(s.tokens.size() - s.cached, left);
          batch.parts.push_back({&s, count});
          left -= count;
        }
    for (const Part& part : batch.parts) {
      Sequence& s = *part.sequence;
      const std::size_t length = s.cached + part.count;
      while (s.pages.size() < pages_for(length)) s.pages.push_back(pool.take());
      const auto first = s.tokens.begin() + static_cast<std::ptrdiff_t>(s.cached);
      batch.tokens.insert(batch.tokens.end(), first, first + static_cast<std::ptrdiff_t>(part.count));
      batch.ends.push_back(static_cast<std::int32_t>(batch.tokens.size()));
      batch.used.push_back(static_cast<std::int32_t>(length));
      batch.entries = std::max(batch.entries, static_cast<std::int64_t>(s.pages.size()));
    }
    for (const Part& part : batch.parts) {
      batch.table.insert(batch.table.end(), part.sequence->pages.begin(), part.sequence->pages.end());
      batch.table.resize((batch.table.size() + static_cast<std::size_t>(batch.entries) - 1) /
                             static_cast<std::size_t>(batch.entries) * static_cast<std::size_t>(batch.entries),
                         -1);  // never read
    }
    return batch;
  }

  // The hidden states of the batch's tokens after the last layer.
  Numbers run(const Batch& given) {
    using tessera::Tensor, tessera::Type;
    Batch batch = given;  // views are not const
    const auto B = static_cast<std::int64_t>(batch.parts.size()), T = static_cast<std::int64_t>(batch.tokens.size());
    const auto integers = [](Tokens& numbers, std::initializer_list<std::int64_t> shape) {
      return Tensor(numbers.data(), Type::i32, shape);
    };
    Numbers x = model.embed(batch.tokens), cos = model.rotary_cos, sin = model.rotary_sin;
    for (std::size_t layer = 0; layer < Model::layers; ++layer) {
      Projected p = model.project(layer, x);
      const auto cache = [&](Numbers& numbers) {
        return Tensor(numbers.data(), Type::f32, {page_count, page_size, Model::kv_heads, Model::dim});
      };
      tessera::AppendArgs append;
      append.k_new = Tensor(p.k.data(), Type::f32, {T, Model::kv_heads, Model::dim});
      append.v_new = Tensor(p.v.data(), Type::f32, {T, Model::kv_heads, Model::dim});
      append.k = cache(caches[layer].k), append.v = cache(caches[layer].v);
      append.cu_seqlens_new = integers(batch.ends, {B + 1}), append.seqused_k = integers(batch.used, {B});
      append.block_table = integers(batch.table, {B, batch.entries});
      append.rotary_cos = Tensor(cos.data(), Type::f32, {Model::positions, Model::dim / 2});
      append.rotary_sin = Tensor(sin.data(), Type::f32, {Model::positions, Model::dim / 2});
      append.q = append.q_out = Tensor(p.q.data(), Type::f32, {T, Model::heads, Model::dim});  // rotated in place
      tessera::append(append);

      tessera::Inputs in;  // the same cache, table and lengths
      in.q = append.q_out, in.k = append.k, in.v = append.v;
      in.cu_seqlens_q = append.cu_seqlens_new, in.seqused_k = append.seqused_k, in.block_table = append.block_table;
      Numbers o(p.q.size());
      // A token of a chunk sees the keys before it: the last query of each sequence faces its last key.
      tessera::forward(in, {.o = Tensor(o.data(), Type::f32, {T, Model::heads, Model::dim})}, {.causal = true});
      model.finish(layer, x, o);
    }
    return x;
  }

  Step describe(const Batch& batch) const {
    Step told;
    for (const Part& part : batch.parts) {
      const Sequence& s = *part.sequence;
      if (s.decodes()) ++told.decoding;
      if (!s.decodes()) told.prompt_tokens += part.count, told.chunks += s.cached + part.count < s.prompt;
    }
    told.pages_in_use = static_cast<std::size_t>(page_count) - pool.available();
    return told;
  }

  void retire() {
    std::erase_if(running, [&](Sequence& s) {
      if (s.tokens.size() < s.end) return false;
      pool.give_back(s.pages);
      finished[s.id] = std::move(s.tokens);
      return true;
    });
  }

  const Model& model;
  std::int64_t page_count, page_size;
  std::size_t tokens_per_step;
  Pages pool;
  std::vector<Cache> caches;  // one for each layer
  std::deque<Request> waiting;
  std::vector<Sequence> running;
};
