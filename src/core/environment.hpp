// SPDX-License-Identifier: Apache-2.0
// The environment as the library may trust it; the only way to it from src/ and cli/ (tests/tree_test.py checks).
// Which variables there are, and what each can do: docs/architecture.md, "Environment variables".
#pragma once

namespace tessera {

// The value of a variable, or null where it is not set. Always null in a program that has more rights than the user who
// started it (setuid, setgid, file capabilities): paths from there lead to code that is loaded and run.
const char* environment(const char* name) noexcept;

}  // namespace tessera
