// SPDX-License-Identifier: Apache-2.0
// Serving with Tessera: eight requests, more than the cache holds at once, through a continuous batching engine.
// A program of its own: copy it. Generates the same tokens the plain way, without a cache, and compares: it fails
// unless they are the same, and unless pages were reused, prompts cut into chunks, and prompts mixed with decoding.
#include <cstdio>

#include "engine.hpp"

int main() {
  const Model model(7);
  Engine engine(model, 12, 8, 20);  // 12 pages of 8 tokens; at most 20 tokens in a step
  std::vector<Request> requests;
  std::mt19937 random(3);
  const std::size_t prompts[] = {5, 37, 1, 24, 11, 40, 8, 16}, lengths[] = {9, 4, 20, 8, 1, 6, 17, 12};
  for (int id = 0; id < 8; ++id) {
    Request request{id, {}, lengths[id]};
    for (std::size_t n = 0; n < prompts[id]; ++n)
      request.prompt.push_back(static_cast<std::int32_t>(random() % Model::vocabulary));
    requests.push_back(request);
  }

  std::size_t steps = 0, mixed = 0, chunks = 0;
  try {
    for (const Request& request : requests) engine.add(request);
    for (; engine.busy(); ++steps) {
      const Step told = engine.step();
      mixed += told.mixed(), chunks += told.chunks;
      std::printf("step %2zu: %zu sequences decode, %2zu tokens of prompts, %2zu pages in use\n", steps, told.decoding,
                  told.prompt_tokens, told.pages_in_use);
    }
    for (const Request& request : requests)
      if (engine.finished[request.id] != generate_without_cache(model, request.prompt, request.new_tokens))
        return std::fprintf(stderr, "request %d: other tokens than without a cache\n", request.id), 1;
  } catch (const tessera::Error& error) {
    return std::fprintf(stderr, "serving failed: %s\n", error.what()), 1;
  }
  if (engine.pages().available() != 12) return std::fprintf(stderr, "pages were lost\n"), 1;
  if (engine.pages().most_owners() < 2 || mixed == 0 || chunks == 0)
    return std::fprintf(stderr, "no page was reused, no batch mixed, or no prompt cut\n"), 1;
  std::printf(
      "%zu steps: %zu mixed batches, %zu chunks of prompts, a page had up to %d owners; "
      "all tokens are those of a run without a cache\n",
      steps, mixed, chunks, engine.pages().most_owners());
  return 0;
}
