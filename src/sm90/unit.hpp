// The generated text of a Hopper kernel: its configuration, and the wgmma instructions for its shapes. Included by
// src/sm90, the compile gate and `tessera pack`.
#pragma once

#include <string>

#include "sm90/backward_config.hpp"

namespace tessera::sm90 {

std::string forward_unit_text(const Config& config);
std::string backward_unit_text(const BackwardConfig& config);

std::string restart_unit_text();  // sm90/kernel/restart.cuh

}  // namespace tessera::sm90
