// A small mixture of experts without torch: the gate chooses experts, their rows are multiplied by weights of 8 bits,
// and a task pool makes one batch of what several clients ask.
//
// Every result is compared with plain loops. The program prints what it found, and ends with status 1 at a difference.
#include <pymoe/kernels/build_routing.h>
#include <pymoe/kernels/dispatch.h>
#include <pymoe/kernels/gate_topk.h>
#include <pymoe/kernels/quantized_linear.h>
#include <pymoe/kernels/quantized_weight.h>
#include <pymoe/runtime/executor.h>
#include <pymoe/runtime/task_pool.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kTokens = 12, kExperts = 4, kChoices = 2, kInputs = 96, kOutputs = 80;
constexpr int64_t kRows = kTokens * kChoices;

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

std::vector<float> random_numbers(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

// --- the gate ---

struct Choice {
  std::vector<float> weights;    // (T, K)
  std::vector<int32_t> experts;  // (T, K)
  std::vector<int32_t> load;     // (E,)
};

Choice choose(const std::vector<float>& logits) {
  Choice choice{std::vector<float>(kRows), std::vector<int32_t>(kRows), std::vector<int32_t>(kExperts)};
  pymoe::cpu::gate_topk({
      .dtype = pymoe::DType::kFloat32,
      .logits = logits.data(),
      .bias = nullptr,
      .weights = choice.weights.data(),
      .experts = choice.experts.data(),
      .load = choice.load.data(),
      .tokens = kTokens,
      .num_experts = kExperts,
      .choices = kChoices,
      .num_groups = 0,
      .topk_groups = 0,
      .options = {.score = pymoe::Score::kSoftmax, .renormalize = true, .scale = 1.0},
  });
  return choice;
}

void check_choice(const std::vector<float>& logits, const Choice& choice) {
  std::vector<int32_t> load(kExperts);
  for (int64_t t = 0; t < kTokens; ++t) {
    const float* row = &logits[t * kExperts];
    std::vector<int32_t> order(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [row](int32_t a, int32_t b) { return row[a] > row[b]; });
    double sum = 0;
    for (int64_t k = 0; k < kChoices; ++k) sum += std::exp(double{row[order[k]]});
    for (int64_t k = 0; k < kChoices; ++k) {
      check(choice.experts[t * kChoices + k] == order[k], "a choice of the gate");
      const double weight = std::exp(double{row[order[k]]}) / sum;
      check(std::abs(choice.weights[t * kChoices + k] - weight) < 1e-6, "a weight of the gate");
      ++load[order[k]];
    }
  }
  check(choice.load == load, "the load of the experts");
}

// --- products with weights of 8 bits ---

constexpr auto kFormat = pymoe::WeightFormat::kInt8;

// Returns (E, N, H) weights in the form that products read.
std::vector<uint8_t> packed(const std::vector<float>& weight) {
  std::vector<uint8_t> bytes(kExperts * pymoe::quantized_tiles(kOutputs) *
                             pymoe::quantized_tile_bytes(kFormat, kInputs));
  pymoe::cpu::quantize_weight({
      .weight = weight.data(),
      .strides = {kOutputs * kInputs, kInputs, 1},
      .packed = bytes.data(),
      .experts = kExperts,
      .outputs = kOutputs,
      .inputs = kInputs,
      .format = kFormat,
      .dtype = pymoe::DType::kFloat32,
  });
  return bytes;
}

struct Routing {
  std::vector<int32_t> slot;     // (T, K): the row that a choice owns
  std::vector<int32_t> token;    // (S,): the token of a row
  std::vector<int32_t> offsets;  // (E + 1,): the rows of an expert begin here
};

Routing route(const Choice& choice) {
  Routing routing{std::vector<int32_t>(kRows), std::vector<int32_t>(kRows), std::vector<int32_t>(kExperts + 1)};
  std::vector<int32_t> workspace(pymoe::cpu::build_routing_workspace(kRows, kExperts));
  pymoe::BuildRoutingArguments arguments{};
  arguments.experts = choice.experts.data();
  arguments.wide = false;
  arguments.slot = routing.slot.data();
  arguments.token = routing.token.data();
  arguments.offsets = routing.offsets.data();
  arguments.workspace = workspace.data();
  arguments.tokens = kTokens;
  arguments.choices = kChoices;
  arguments.num_experts = kExperts;
  arguments.capacity = kRows;  // nothing is dropped
  pymoe::cpu::build_routing(arguments);
  return routing;
}

// Returns the products (S, N) of rows that are sorted by expert.
std::vector<float> multiplied(const std::vector<float>& rows, const std::vector<int32_t>& offsets,
                              const std::vector<uint8_t>& weight) {
  const auto count = static_cast<int64_t>(rows.size()) / kInputs;
  std::vector<float> out(count * kOutputs);
  std::vector<uint8_t> workspace(pymoe::quantized_linear_workspace(count, kInputs, kFormat));
  pymoe::cpu::quantized_linear({
      .x = rows.data(),
      .packed = weight.data(),
      .offsets = offsets.data(),
      .bias = nullptr,
      .out = out.data(),
      .rows = count,
      .inputs = kInputs,
      .outputs = kOutputs,
      .experts = kExperts,
      .format = kFormat,
      .dtype = pymoe::DType::kFloat32,
      .workspace = workspace.data(),
  });
  return out;
}

// Compares with products of the weights before they were rounded. A code is off by at most half a step, and the largest
// weight of an output has 127 steps; an input is off by at most 2^-15 of the largest input of its row, of which twice
// is allowed, for the products of both errors. Returns the largest error as a part of what this allows.
double check_products(const std::vector<float>& x, const std::vector<float>& weight, const Routing& routing,
                      const std::vector<float>& out) {
  double worst = 0;
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t row = routing.offsets[e]; row < routing.offsets[e + 1]; ++row) {
      const float* inputs = &x[routing.token[row] * kInputs];
      for (int64_t n = 0; n < kOutputs; ++n) {
        const float* weights = &weight[(e * kOutputs + n) * kInputs];
        double product = 0, inputs_sum = 0, weights_sum = 0, largest_input = 0, largest_weight = 0;
        for (int64_t h = 0; h < kInputs; ++h) {
          product += double{inputs[h]} * weights[h];
          inputs_sum += std::abs(inputs[h]);
          weights_sum += std::abs(weights[h]);
          largest_input = std::max(largest_input, double{std::abs(inputs[h])});
          largest_weight = std::max(largest_weight, double{std::abs(weights[h])});
        }
        const double allowed = inputs_sum * largest_weight / 127 / 2 + weights_sum * largest_input / 32768 * 2;
        worst = std::max(worst, std::abs(out[row * kOutputs + n] - product) / allowed);
      }
    }
  }
  check(worst > 0 && worst <= 1, "a product");
  return worst;
}

// --- batches ---

using Sync = pymoe::runtime::SystemSync;

// One row for expert 0; its result.
struct Ask : pymoe::runtime::Request<Sync> {
  explicit Ask(const float* row) : Request(1, 0), row(row), out(kOutputs) {}
  const float* row;
  std::vector<float> out;
};

class Multiply : public pymoe::runtime::BatchFunction<Sync> {
 public:
  explicit Multiply(const std::vector<uint8_t>& weight) : weight_(weight) {}

  void run(std::span<const pymoe::runtime::Slice<Sync>> batch) override {
    std::vector<float> rows;
    for (const auto& slice : batch) {
      const float* row = static_cast<Ask&>(*slice.request).row;
      rows.insert(rows.end(), row, row + kInputs);
    }
    std::vector<int32_t> offsets(kExperts + 1, static_cast<int32_t>(batch.size()));
    offsets[0] = 0;
    const std::vector<float> out = multiplied(rows, offsets, weight_);
    for (size_t i = 0; i < batch.size(); ++i) {
      std::copy_n(&out[i * kOutputs], kOutputs, static_cast<Ask&>(*batch[i].request).out.begin());
    }
  }

 private:
  const std::vector<uint8_t>& weight_;
};

void serve(const std::vector<float>& x, const std::vector<uint8_t>& weight) {
  auto pool = pymoe::runtime::TaskPool<Sync>::create("expert", {}, std::make_shared<Multiply>(weight),
                                                     std::make_shared<pymoe::runtime::Strand<Sync>>());
  std::vector<std::shared_ptr<Ask>> asked;
  for (int64_t t = 0; t < kTokens; ++t) {
    asked.push_back(std::make_shared<Ask>(&x[t * kInputs]));
    check(pool->submit(asked.back(), Sync::Time::max()), "a request is queued");
  }
  pymoe::runtime::Executor<Sync> executor(2);
  executor.attach(pool->strand());  // what has been queued before runs in one batch
  for (int64_t t = 0; t < kTokens; ++t) {
    check(pool->wait(asked[t], Sync::Time::max()) && !asked[t]->error(), "a request ends well");
    // The bits of a row do not depend on the rows around it.
    const std::vector<float> row(&x[t * kInputs], &x[t * kInputs] + kInputs);
    check(asked[t]->out == multiplied(row, {0, 1, 1, 1, 1}, weight), "a row of a batch");
  }
  const auto batches = static_cast<long long>(pool->statistics().batches.value());
  check(batches == 1, "the requests run in one batch");
  std::printf("runtime: %lld requests, %lld batch\n", static_cast<long long>(kTokens), batches);
}

}  // namespace

int main() {
  const std::vector<float> logits = random_numbers(kTokens * kExperts, 1);
  const std::vector<float> x = random_numbers(kTokens * kInputs, 2);
  const std::vector<float> weight = random_numbers(kExperts * kOutputs * kInputs, 3);

  const Choice choice = choose(logits);
  check_choice(logits, choice);
  std::printf("gate: token 0 chooses experts %d and %d; load", choice.experts[0], choice.experts[1]);
  for (const int32_t load : choice.load) std::printf(" %d", load);

  const Routing routing = route(choice);
  std::vector<float> rows(kRows * kInputs);
  pymoe::cpu::dispatch({
      .x = x.data(),
      .slot = routing.slot.data(),
      .used = &routing.offsets[kExperts],
      .out = rows.data(),
      .tokens = kTokens,
      .choices = kChoices,
      .rows = kRows,
      .row_bytes = kInputs * static_cast<int64_t>(sizeof(float)),
  });
  const std::vector<uint8_t> codes = packed(weight);
  const double error = check_products(x, weight, routing, multiplied(rows, routing.offsets, codes));
  std::printf("\nproducts: %zu bytes of weights are now %zu; the largest error is %.2f of what rounding allows\n",
              weight.size() * sizeof(float), codes.size(), error);

  serve(x, codes);
  return 0;
}
