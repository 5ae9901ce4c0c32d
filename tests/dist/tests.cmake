# Attention over several ranks: see docs/testing.md, "The folders of tests/".
tessera_test(NAME dist_schedule_test SOURCES dist/schedule_test.cpp LIBRARIES tessera_static LABELS dist)
