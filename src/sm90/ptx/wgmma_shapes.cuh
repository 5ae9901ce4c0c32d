// SPDX-License-Identifier: Apache-2.0
// The table of wgmma instructions. An instruction names every register of its result, and inline assembly numbers them,
// so each shape is a row here: 64 rows by n columns by 16, in f16 or bf16, summed in f32. Included by
// sm90/ptx/wgmma.cuh, which says what the functions do. PTX ISA, "wgmma.mma_async". Device code.
#pragma once

#include "sm90/config.hpp"
#include "sm90/layout.hpp"

namespace tessera::sm90 {

// clang-format off

// The registers of a result of n columns, as the instruction names them.
#define RESULT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RESULT_32 RESULT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define RESULT_48 RESULT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define RESULT_64 RESULT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define RESULT_80 RESULT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RESULT_96 RESULT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define RESULT_112 RESULT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define RESULT_128 RESULT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define RESULT_144 RESULT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define RESULT_160 RESULT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define RESULT_176 RESULT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define RESULT_192 RESULT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define RESULT_208 RESULT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define RESULT_224 RESULT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define RESULT_240 RESULT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define RESULT_256 RESULT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

// The same as operands. `c`: "=f" for one that is only written, "+f" for one that is also read.
#define OUT_16(c) c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7])
#define OUT_32(c) OUT_16(c), c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define OUT_48(c) OUT_32(c), c(d[16]), c(d[17]), c(d[18]), c(d[19]), c(d[20]), c(d[21]), c(d[22]), c(d[23])
#define OUT_64(c) OUT_48(c), c(d[24]), c(d[25]), c(d[26]), c(d[27]), c(d[28]), c(d[29]), c(d[30]), c(d[31])
#define OUT_80(c) OUT_64(c), c(d[32]), c(d[33]), c(d[34]), c(d[35]), c(d[36]), c(d[37]), c(d[38]), c(d[39])
#define OUT_96(c) OUT_80(c), c(d[40]), c(d[41]), c(d[42]), c(d[43]), c(d[44]), c(d[45]), c(d[46]), c(d[47])
#define OUT_112(c) OUT_96(c), c(d[48]), c(d[49]), c(d[50]), c(d[51]), c(d[52]), c(d[53]), c(d[54]), c(d[55])
#define OUT_128(c) OUT_112(c), c(d[56]), c(d[57]), c(d[58]), c(d[59]), c(d[60]), c(d[61]), c(d[62]), c(d[63])
#define OUT_144(c) OUT_128(c), c(d[64]), c(d[65]), c(d[66]), c(d[67]), c(d[68]), c(d[69]), c(d[70]), c(d[71])
#define OUT_160(c) OUT_144(c), c(d[72]), c(d[73]), c(d[74]), c(d[75]), c(d[76]), c(d[77]), c(d[78]), c(d[79])
#define OUT_176(c) OUT_160(c), c(d[80]), c(d[81]), c(d[82]), c(d[83]), c(d[84]), c(d[85]), c(d[86]), c(d[87])
#define OUT_192(c) OUT_176(c), c(d[88]), c(d[89]), c(d[90]), c(d[91]), c(d[92]), c(d[93]), c(d[94]), c(d[95])
#define OUT_208(c) OUT_192(c), c(d[96]), c(d[97]), c(d[98]), c(d[99]), c(d[100]), c(d[101]), c(d[102]), c(d[103])
#define OUT_224(c) OUT_208(c), c(d[104]), c(d[105]), c(d[106]), c(d[107]), c(d[108]), c(d[109]), c(d[110]), c(d[111])
#define OUT_240(c) OUT_224(c), c(d[112]), c(d[113]), c(d[114]), c(d[115]), c(d[116]), c(d[117]), c(d[118]), c(d[119])
#define OUT_256(c) OUT_240(c), c(d[120]), c(d[121]), c(d[122]), c(d[123]), c(d[124]), c(d[125]), c(d[126]), c(d[127])

// One function. `a` and `b` are the instruction's operands. `scale_d` says whether the result is added to. `transposed`
// says whether operands in shared memory run along their rows (0) or over them (1).
#define WGMMA_FUNCTION(name, type, n, c, parameters, a, b, scale_d, transposed, ...)                                   \
  __device__ static void name(float (&d)[n / 2], parameters) {                                                         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " scale_d ", 0; wgmma.mma_async.sync.aligned.m64n" #n                 \
                 "k16.f32." type "." type " {" RESULT_##n "}, " a ", " b ", p, 1, 1, " transposed "; }"                \
                 : OUT_##n(c)                                                                                       \
                 : __VA_ARGS__);                                                                                       \
  }

#define COMMA ,
#define TILES Operand a COMMA Operand b
#define REGISTERS const UInt32* a COMMA Operand b COMMA bool accumulate

// One shape in one type. i0 to i5: the numbers of the inputs, which follow the result's.
#define WGMMA_SHAPE(element, type, n, i0, i1, i2, i3, i4, i5)                                                          \
  template <>                                                                                                          \
  struct Wgmma<n, Element::element> {                                                                                  \
    WGMMA_FUNCTION(set, type, n, "=f", TILES, i0, i1, "0", "0, 0", "l"(a.bits), "l"(b.bits))                           \
    WGMMA_FUNCTION(set_in_place, type, n, "+f", TILES, i0, i1, "0", "0, 0", "l"(a.bits), "l"(b.bits))                  \
    WGMMA_FUNCTION(add, type, n, "+f", TILES, i0, i1, "1", "0, 0", "l"(a.bits), "l"(b.bits))                           \
    WGMMA_FUNCTION(set_over_rows, type, n, "=f", TILES, i0, i1, "0", "0, 1", "l"(a.bits), "l"(b.bits))                 \
    WGMMA_FUNCTION(add_over_rows, type, n, "+f", TILES, i0, i1, "1", "0, 1", "l"(a.bits), "l"(b.bits))                 \
    WGMMA_FUNCTION(add, type, n, "+f", REGISTERS, "{" i0 ", " i1 ", " i2 ", " i3 "}", i4, i5, "1", "r"(a[0]),          \
                   "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(accumulate)))                                 \
  };
#define WGMMA_SHAPES(...) WGMMA_SHAPE(bf16, "bf16", __VA_ARGS__) WGMMA_SHAPE(f16, "f16", __VA_ARGS__)

WGMMA_SHAPES(16, "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA_SHAPES(32, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_SHAPES(48, "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA_SHAPES(64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_SHAPES(80, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA_SHAPES(96, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_SHAPES(112, "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA_SHAPES(128, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_SHAPES(144, "%72", "%73", "%74", "%75", "%76", "%77")
WGMMA_SHAPES(160, "%80", "%81", "%82", "%83", "%84", "%85")
WGMMA_SHAPES(176, "%88", "%89", "%90", "%91", "%92", "%93")
WGMMA_SHAPES(192, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA_SHAPES(208, "%104", "%105", "%106", "%107", "%108", "%109")
WGMMA_SHAPES(224, "%112", "%113", "%114", "%115", "%116", "%117")
WGMMA_SHAPES(240, "%120", "%121", "%122", "%123", "%124", "%125")
WGMMA_SHAPES(256, "%128", "%129", "%130", "%131", "%132", "%133")

#undef WGMMA_SHAPES
#undef WGMMA_SHAPE
#undef REGISTERS
#undef TILES
#undef COMMA
#undef WGMMA_FUNCTION

// clang-format on

}  // namespace tessera::sm90
