#pragma once

#include <memory>

#include "kvferry/policy.hpp"

namespace kvferry {

std::unique_ptr<Policy> make_lhd(Tier tier, const Clock& clock, const ReuseHistory& history);

}  // namespace kvferry
