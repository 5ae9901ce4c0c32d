# Tests of the CPU kernels and of the reference. Included by tests/CMakeLists.txt, which defines tessera_test.
tessera_test(NAME reference_test SOURCES cpu/reference_test.cpp SHARDS 2)
tessera_test(NAME ancestors_test SOURCES cpu/ancestors_test.cpp)
tessera_test(NAME cases_test SOURCES cpu/cases_test.cpp SHARDS 4)
tessera_test(NAME random_test SOURCES cpu/random_test.cpp SHARDS 4)
tessera_test(NAME simd_test SOURCES cpu/simd_test.cpp)
# Races are in what all instruction sets share: under ThreadSanitizer, tens of times slower, one of them is enough.
if(TESSERA_SANITIZE STREQUAL "thread" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(raced_kernels "TESSERA_TEST_KERNELS=reference sse4")
endif()
tessera_test(NAME invariance_test SOURCES cpu/invariance_test.cpp SHARDS 3 LABELS threads ENVIRONMENT ${raced_kernels})
tessera_test(NAME edge_test SOURCES cpu/edge_test.cpp LABELS threads)
tessera_test(NAME merge_test SOURCES cpu/merge_test.cpp)
tessera_test(NAME range_test SOURCES cpu/range_test.cpp)
tessera_test(NAME types_test SOURCES cpu/types_test.cpp)
tessera_test(NAME philox_test SOURCES cpu/philox_test.cpp)

include(${CMAKE_CURRENT_LIST_DIR}/amx.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/isa.cmake)
