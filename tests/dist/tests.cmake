# Attention over several ranks: see docs/testing.md, "The folders of tests/".
tessera_test(NAME dist_schedule_test SOURCES dist/schedule_test.cpp LIBRARIES tessera_static LABELS dist)
tessera_test(NAME dist_attention_test SOURCES dist/attention_test.cpp LIBRARIES tessera_static LABELS dist threads)
tessera_test(NAME dist_fault_test SOURCES dist/fault_test.cpp LIBRARIES tessera_static LABELS dist threads)
