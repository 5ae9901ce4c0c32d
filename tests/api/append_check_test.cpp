// SPDX-License-Identifier: Apache-2.0
// Every rule for the arguments of append refuses with its own sentence and leaves cache and outputs as they were.
// The rules are the rows of tests/api/append_rows.hpp.
// Links tessera_cases. Implements the contract's "No surprises" (docs/algorithm.md).
#include "tests/api/append_rows.hpp"

namespace tessera::test {
namespace {

// A valid call in each form: 2 sequences, 3 new tokens each, 2 heads of 8 and 6 dims, 6 of them rotated.
struct Prepared {
  Buffer k_new, v_new, q, cos, sin, k, v, q_out, status, block_table, page_indices;
  AppendArguments c;

  explicit Prepared(Form form) :
      cos(filled(Type::f32, {8, 3}, 1)), sin(filled(Type::f32, {8, 3}, 0)), status(of(Type::i32, {1}, {4})),
      block_table(of(Type::i32, {2, 3}, {2, 0, 99, 3, 1, 99})), page_indices(of(Type::i32, {5}, {2, 0, 99, 3, 1})) {
    const bool packed = form == Form::packed || form == Form::packed_slots, piece = form == Form::piece;
    const auto rows = [&](std::int64_t heads, std::int64_t width) {
      return filled(Type::f32, packed ? Shape{6, heads, width} : Shape{2, 3, heads, width}, 1);
    };
    k_new = rows(2, 8), v_new = rows(2, 6), q = rows(4, 8);
    k = Buffer(Type::f32, piece ? Shape{2, 8, 2, 8} : Shape{4, 4, 2, 8});
    v = Buffer(Type::f32, piece ? Shape{2, 8, 2, 6} : Shape{4, 4, 2, 6});
    q_out = Buffer(Type::f32, packed ? Shape{6, 4, 8} : Shape{2, 3, 4, 8});
    AppendArgs& a = c.args;
    a.k_new = k_new.tensor(), a.v_new = v_new.tensor(), a.k = k.tensor(), a.v = v.tensor();
    a.rotary_cos = cos.tensor(), a.rotary_sin = sin.tensor(), a.q = q.tensor(), a.q_out = q_out.tensor();
    if (!piece) a.status = status.tensor();
    const std::int64_t B = 2, n = 3;
    if (form == Form::slots)
      a.slots = Tensor(nullptr, Type::i64, {B, n}), a.positions = Tensor(nullptr, Type::i32, {B, n});
    if (form == Form::packed_slots)
      a.slots = Tensor(nullptr, Type::i64, {6}), a.positions = Tensor(nullptr, Type::i32, {6});
    if (!a.slots) a.seqused_k = Tensor(nullptr, Type::i32, {B});
    if (form == Form::packed) a.cu_seqlens_new = Tensor(nullptr, Type::i32, {B + 1});
    if (form == Form::table || form == Form::packed) a.block_table = block_table.tensor();
    c.page_indptr = Tensor(nullptr, Type::i32, {B + 1}), c.page_indices = page_indices.tensor();
  }

  // The contents of lengths and slots live in the arguments, so that a row can spoil them.
  void place() {
    AppendArgs& a = c.args;
    a.cu_seqlens_new.data = c.offsets.data(), a.seqused_k.data = c.lengths.data(), a.slots.data = c.slots.data();
    a.positions.data = c.positions.data(), a.page_indptr.data = c.indptr.data();
  }

  void expect_untouched() const {
    for (const Buffer* out : {&k, &v, &q_out})
      for (std::int64_t e = 0; e < out->elements(); ++e) ASSERT_TRUE(out->untouched(e));
    ASSERT_EQ(status.get(0), 4);
  }
};

class AppendCheck : public testing::TestWithParam<AppendRow> {};

TEST_P(AppendCheck, RefusesWithItsSentence) {
  const AppendRow& row = GetParam();
  Prepared prepared(row.form);
  row.spoil(prepared.c);
  prepared.place();
  try {
    append(prepared.c.args, prepared.c.execution);
    FAIL() << "no error; expected: " << row.sentence;
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), row.sentence);
    EXPECT_EQ(error.status(), row.status);
  }
  prepared.expect_untouched();
  ++case_count.judged;
}

INSTANTIATE_TEST_SUITE_P(All, AppendCheck, testing::ValuesIn(append_rows),
                         [](const testing::TestParamInfo<AppendRow>& info) { return info.param.name; });

// The rows prove nothing unless the calls that they spoil are fine by themselves.
TEST(Unspoiled, EveryFormIsAccepted) {
  for (const Form form : {Form::table, Form::packed, Form::piece, Form::slots, Form::packed_slots}) {
    Prepared prepared(form);
    prepared.place();
    EXPECT_NO_THROW(append(prepared.c.args)) << static_cast<int>(form);
    std::int64_t written = 0;
    for (std::int64_t e = 0; e < prepared.k.elements(); ++e) written += !prepared.k.untouched(e);
    const std::int64_t stored = form == Form::piece || form == Form::table ? 6 : 5;  // a gap, or a slot below 0
    EXPECT_EQ(written, stored * 2 * 8) << static_cast<int>(form);
    ++case_count.judged;
  }
}

// More tokens than any memory holds, by stride 0.
TEST(Limits, TokensWithoutMemoryAreRefused) {
  static float number = 1;
  static std::int32_t page = 0;
  const std::int64_t most = std::int64_t{1} << 47;
  AppendArgs a;
  a.k_new = a.v_new = Tensor(&number, Type::f32, {most, 1, 1}), a.k_new.strides = a.v_new.strides = {0, 1, 1, 0};
  a.slots = Tensor(&page, Type::i32, {most}), a.slots.strides = {0, 0, 0, 0};
  Buffer k(Type::f32, {1, 1, 1, 1}), v(Type::f32, {1, 1, 1, 1});
  a.k = k.tensor(), a.v = v.tensor();
  try {
    append(a);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_OUT_OF_MEMORY);
  }
  EXPECT_TRUE(k.untouched(0) && v.untouched(0));
}

}  // namespace
}  // namespace tessera::test
