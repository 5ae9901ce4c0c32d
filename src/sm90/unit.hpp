// SPDX-License-Identifier: Apache-2.0
// The generated text of a Hopper kernel: its configuration and its template. Included by
// src/sm90 and the tests.
#pragma once

#include <string>

#include "sm90/backward_config.hpp"
#include "sm90/one_pass_config.hpp"

namespace tessera::sm90 {

std::string forward_unit_text(const Config& config);
std::string backward_unit_text(const BackwardConfig& config);
std::string one_pass_unit_text(const OnePassConfig& config);
std::string prepare_unit_text(const OnePassConfig& config, Element o, int lanes);
std::string finish_unit_text(const OnePassConfig& config, Element dQ);

std::string restart_unit_text();  // sm90/kernel/restart.cuh

}  // namespace tessera::sm90
