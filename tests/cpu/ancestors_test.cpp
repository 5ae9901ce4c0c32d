// SPDX-License-Identifier: Apache-2.0
// The ancestors' printed figures: B's corners, right and wrong, and C's 4x4 case worked by hand.
// Links tessera_cases.
// Implements docs/numerics.md, "A forgotten factor", and docs/algorithm.md, "A 4x4 case by hand".
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cases/ancestor_b.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

using Corner = std::array<std::array<const char*, 3>, 3>;

// What the five arrays' corners are, in float64, to six significant digits.
constexpr Corner O_corner{{{"0.016065", "-0.0290427", "-0.027025"},
                           {"0.011394", "-0.00482534", "-0.03082"},
                           {"0.0286616", "-0.0218805", "-0.0718517"}}};
constexpr Corner dQ_corner{{{"0.00946975", "0.00569055", "0.0007855"},
                            {"-0.00670553", "-0.00763953", "-0.0156887"},
                            {"-0.00887811", "0.0160615", "0.0198677"}}};
constexpr Corner dK_corner{{{"0.00480869", "-0.00776059", "-0.00402077"},
                            {"0.0102126", "0.0126519", "0.0243553"},
                            {"0.00513837", "0.0136316", "0.0141893"}}};
constexpr Corner dV_corner{{{"-0.0712795", "-0.0072766", "-0.00910687"},
                            {"-0.0345493", "-0.0283635", "0.00945967"},
                            {"-0.0471181", "0.000656005", "-0.015904"}}};

std::string six_digits(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

CaseData problem_b(Type type) {
  const AncestorB b = ancestor_b();
  CaseData data = build({.name = "ancestor_b", .Nq = b.N, .Nk = b.N, .Hq = 1, .Hk = 1, .D = b.D, .type = type});
  data.q.fill({b.Q.begin(), b.Q.end()});
  data.k.fill({b.K.begin(), b.K.end()});
  data.v.fill({b.V.begin(), b.V.end()});
  data.d_o.fill({b.dO.begin(), b.dO.end()});
  return data;
}

TEST(AncestorB, InputsAreThoseOfGlibcRand) {
  const AncestorB b = ancestor_b();
  EXPECT_EQ(six_digits(b.Q[0]), "0.680375");
  EXPECT_EQ(six_digits(b.K[1]), "-0.604897");
  EXPECT_EQ(six_digits(b.V[2]), "-0.0452059");
  EXPECT_EQ(six_digits(b.Q[2 * b.D + 2]), "0.0648819");
  EXPECT_EQ(six_digits(b.V[2 * b.D + 2]), "-0.479006");
#ifdef __GLIBC__
  std::srand(1);
  for (std::size_t n = 0; n < b.Q.size(); ++n)
    for (const auto* tensor : {&b.Q, &b.K, &b.V, &b.dO})
      ASSERT_EQ((*tensor)[n], 2.0f * static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 1.0f) << n;
#endif
}

TEST(AncestorB, CornersInFloat64ToSixDigits) {
  CaseData data = problem_b(Type::f64);
  run(data, {.kernel = "reference"});
  const auto expect_corner = [](const char* name, const Buffer& x, const Corner& corner) {
    for (std::size_t i = 0; i < 3; ++i)
      for (std::size_t d = 0; d < 3; ++d)
        EXPECT_EQ(six_digits(x.get(static_cast<std::int64_t>(i * AncestorB::D + d))), corner[i][d]) << name << i << d;
  };
  expect_corner("O", data.o, O_corner);
  expect_corner("dQ", data.dq, dQ_corner);
  expect_corner("dK", data.dk, dK_corner);
  expect_corner("dV", data.dv, dV_corner);
}

// In f32 the sixth digit may be one off, and an entry near zero carries the absolute error of its neighbours.
TEST(AncestorB, CornersOfEveryKernelInFloat32) {
  for (const std::string& kernel : available_kernels()) {
    CaseData data = problem_b(Type::f32);
    run(data, {.kernel = kernel.c_str()});
    const auto expect_corner = [&](const char* name, const Buffer& x, const Corner& corner) {
      for (std::size_t i = 0; i < 3; ++i)
        for (std::size_t d = 0; d < 3; ++d) {
          const double wanted = std::atof(corner[i][d]),
                       unit = std::pow(10, std::floor(std::log10(std::abs(wanted))) - 5);
          EXPECT_NEAR(x.get(static_cast<std::int64_t>(i * AncestorB::D + d)), wanted, unit + 2e-8)
              << kernel << " " << name << i << d;
        }
    };
    expect_corner("O", data.o, O_corner);
    expect_corner("dQ", data.dq, dQ_corner);
    expect_corner("dK", data.dk, dK_corner);
    expect_corner("dV", data.dv, dV_corner);
  }
}

// B's forward pass with its bug: the old O was already divided by l_old, and nothing multiplies it back.
TEST(AncestorB, WrongFiguresComeFromTheForgottenRescale) {
  constexpr std::int64_t N = AncestorB::N, D = AncestorB::D, tile = 32;
  const AncestorB b = ancestor_b();
  const auto wrong_row = [&](std::int64_t i, bool forget) {
    std::vector<double> O(D, 0.0);
    double m = -1e300, l = 0;
    for (std::int64_t first = 0; first < N; first += tile) {
      std::array<double, tile> S{};
      double m_tile = -1e300, l_tile = 0;
      for (std::int64_t j = 0; j < tile; ++j) {
        double s = 0;
        for (std::int64_t d = 0; d < D; ++d)
          s += double(b.Q[static_cast<std::size_t>(i * D + d)]) * b.K[static_cast<std::size_t>((first + j) * D + d)];
        S[static_cast<std::size_t>(j)] = s / std::sqrt(double(D));
        m_tile = std::max(m_tile, S[static_cast<std::size_t>(j)]);
      }
      for (double& s : S) s = std::exp(s - m_tile), l_tile += s;
      const double m_new = std::max(m, m_tile);
      const double old = std::exp(m - m_new), now = std::exp(m_tile - m_new), l_new = old * l + now * l_tile;
      for (std::int64_t d = 0; d < D; ++d) {
        double PV = 0;
        for (std::int64_t j = 0; j < tile; ++j)
          PV += S[static_cast<std::size_t>(j)] * b.V[static_cast<std::size_t>((first + j) * D + d)];
        double& o = O[static_cast<std::size_t>(d)];
        o = (old * (forget ? 1 : l) * o + now * PV) / l_new;
      }
      m = m_new, l = l_new;
    }
    return O;
  };
  const auto wrong = wrong_row(0, true), right = wrong_row(0, false);
  EXPECT_EQ(six_digits(wrong[0]), "0.00981674");
  EXPECT_EQ(six_digits(wrong[1]), "0.013525");
  EXPECT_EQ(six_digits(wrong[2]), "0.0224509");
  for (std::size_t d = 0; d < 3; ++d) EXPECT_EQ(six_digits(right[d]), O_corner[0][d]);
}

// C's 4x4 case: Q = K = V = dO = identity, scale 1/2. Each row's scores are 1/2 on the diagonal and 0 beside it.
//   Z     = e^(1/2) + 3 = 4.648721,   LSE = log Z = 1.536592
//   p     = e^(1/2)/Z = 0.354661 on the diagonal, q = 1/Z = 0.215113 elsewhere;  O = P
//   delta = p (rowsum of dO * O),  dP = I, so dS = p (1 - p) = 0.228877 on the diagonal, -p q = -0.076292 elsewhere
//   dV = transpose(P) = P,  dQ = dK = dS / 2: 0.114438 and -0.038146
TEST(AncestorC, IdentityFourByFourByHand) {
  for (const std::string& kernel : available_kernels()) {
    CaseData data = build(find_case("identity_4x4"));
    run(data, {.kernel = kernel.c_str()});
    for (std::int64_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(data.lse.get(i), 1.536592, 1e-6) << kernel;
      for (std::int64_t j = 0; j < 4; ++j) {
        const bool diagonal = i == j;
        EXPECT_NEAR(data.o.get(i * 4 + j), diagonal ? 0.354661 : 0.215113, 1e-6) << kernel;
        EXPECT_NEAR(data.dv.get(i * 4 + j), diagonal ? 0.354661 : 0.215113, 1e-6) << kernel;
        EXPECT_NEAR(data.dq.get(i * 4 + j), diagonal ? 0.114438 : -0.038146, 1e-6) << kernel;
        EXPECT_NEAR(data.dk.get(i * 4 + j), diagonal ? 0.114438 : -0.038146, 1e-6) << kernel;
      }
    }
  }
}

TEST(AncestorC, Random128x64AgreesWithFloat64) {
  for (const std::string& kernel : available_kernels())
    expect_ok(run_case(find_case("random_128x64"), Execution{.kernel = kernel.c_str()}));
}

}  // namespace
}  // namespace tessera::test
