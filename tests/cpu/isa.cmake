# SPDX-License-Identifier: Apache-2.0
# Lesser processors than this one: tests in which the library chooses its kernels, with $TESSERA_ISA hiding what this
# processor has beyond AVX2, and beyond SSE4; the tables run on every instruction set anyway.
# Included by tests/cpu/tests.cmake.
if(TESSERA_X86_64)
  foreach(isa avx2 sse4)
    foreach(test abi_test edge_test plan_test types_test)
      add_test(NAME ${test}.${isa} COMMAND ${test} --gtest_brief=1)
      set_tests_properties(${test}.${isa} PROPERTIES ENVIRONMENT TESSERA_ISA=${isa} TIMEOUT ${test_timeout})
    endforeach()
  endforeach()
endif()
