# SPDX-License-Identifier: Apache-2.0
# Attention over several ranks: see docs/testing.md, "The folders of tests/". `make test-dist` builds dist_tests.
add_custom_target(dist_tests)
tessera_test(NAME dist_schedule_test SOURCES dist/schedule_test.cpp LIBRARIES tessera_static LABELS dist)
tessera_test(NAME dist_attention_test SOURCES dist/attention_test.cpp LIBRARIES tessera_static LABELS dist threads)
tessera_test(NAME dist_memory_test SOURCES dist/memory_test.cpp LIBRARIES tessera_static LABELS dist threads)
tessera_test(NAME dist_fault_test SOURCES dist/fault_test.cpp LIBRARIES tessera_static LABELS dist threads)
tessera_test(NAME dist_no_memory_test SOURCES dist/no_memory_test.cpp LIBRARIES tessera_static LABELS dist)
tessera_test(NAME dist_own_thread_test SOURCES dist/own_thread_test.cpp LIBRARIES tessera_static LABELS dist threads)
tessera_test(NAME dist_decode_test SOURCES dist/decode_test.cpp LIBRARIES tessera_static LABELS dist threads)
tessera_test(NAME dist_simulate_test SOURCES dist/simulate_test.cpp LIBRARIES tessera_static LABELS dist)
tessera_test(NAME dist_api_test SOURCES dist/api_test.cpp dist/api_decode_test.cpp dist/api_places_test.cpp LIBRARIES tessera_static LABELS dist threads)
add_dependencies(dist_tests dist_api_test fake_nccl_test dist_simulate_test dist_schedule_test dist_attention_test
                 dist_decode_test dist_fault_test dist_memory_test dist_no_memory_test dist_own_thread_test)

if(TARGET tessera_cli)  # for cli_dist_test
  add_dependencies(dist_tests tessera_cli)
endif()

# Processes under mpirun. Without MPI there is no program, and the tests are skipped where ctest shows it.
if(TARGET tessera_mpi)
  foreach(program ranks overlap)
    add_executable(dist_mpi_${program} dist/mpi_${program}.cpp)
    target_include_directories(dist_mpi_${program} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_options(dist_mpi_${program} PRIVATE ${test_options})
    target_link_libraries(dist_mpi_${program} PRIVATE tessera_mpi_objects tessera_static)
    add_dependencies(dist_tests dist_mpi_${program})
  endforeach()
endif()
if(NOT TESSERA_SANITIZE)  # whose reports MPI's own libraries would fill
  foreach(mode check faults)
    add_test(NAME dist_mpi_${mode}
             COMMAND python3 -B ${PROJECT_SOURCE_DIR}/tests/dist/mpi_test.py ${CMAKE_CURRENT_BINARY_DIR}/dist_mpi_ranks ${mode})
    set_tests_properties(dist_mpi_${mode} PROPERTIES TIMEOUT ${test_timeout} LABELS "dist;mpi" SKIP_RETURN_CODE 77)
  endforeach()
  add_test(NAME dist_namespaces_check
           COMMAND python3 -B ${PROJECT_SOURCE_DIR}/tests/dist/namespaces.py ${CMAKE_CURRENT_BINARY_DIR} check)
  set_tests_properties(dist_namespaces_check PROPERTIES TIMEOUT ${test_timeout} LABELS "dist;mpi" SKIP_RETURN_CODE 77)
endif()
