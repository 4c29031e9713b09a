// The names of scores in the schemas of operators.
#pragma once

#include <string>

#include "core/score.h"
#include "ops/check.h"

namespace pymoe::ops {

inline Score score_named(const char* operator_name, const std::string& name) {
  require(name == "softmax" || name == "sigmoid", operator_name, "score must be one of 'softmax', 'sigmoid', got '",
          name, "'");
  return name == "softmax" ? Score::kSoftmax : Score::kSigmoid;
}

}  // namespace pymoe::ops
