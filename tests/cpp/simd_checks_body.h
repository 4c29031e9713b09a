// Checks of simd.h, compiled once per instruction set (for_each_isa.h). They count errors and leave the verdict to
// test_simd.cpp, since no code of the test framework may be compiled for a wider instruction set.

namespace pymoe::cpu::PYMOE_ISA {

// Returns exp's greatest error, in units in the last place of the true result, over all floats at steps of `stride`.
inline double worst_exp_error(uint32_t stride) {
  double worst = 0;
  for (uint64_t next = 0; next <= 0xffffffffu;) {
    float inputs[kLanes<float>], outputs[kLanes<float>];
    for (float& input : inputs) {
      input = bit_cast<float>(static_cast<uint32_t>(next));
      next += stride;
    }
    store(outputs, exp(load(inputs)));
    for (int lane = 0; lane < kLanes<float>; ++lane) {
      if (inputs[lane] != inputs[lane]) {
        if (outputs[lane] == outputs[lane]) return 1e30;
        continue;
      }
      const double expected = std::exp(static_cast<double>(inputs[lane]));
      if (expected > 3.4028235e38) {
        if (outputs[lane] < 3.4028233e38f) return 1e30;  // neither infinity nor within 2 ulp of overflow
        continue;
      }
      const double unit = expected < 1.1754943508222875e-38 ? 0x1p-149 : std::ldexp(1.0, std::ilogb(expected) - 23);
      const double error = std::fabs(static_cast<double>(outputs[lane]) - expected) / unit;
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

// Checks load_partial and store_partial for every count: they touch exactly `count` elements, other lanes are zero.
template <typename T>
int wrong_partial_accesses() {
  int wrong = 0;
  for (int count = 0; count <= kStep<T>; ++count) {
    // The source ends where the access must end, so that a sanitizer sees one element too many.
    const std::unique_ptr<T[]> source(new T[static_cast<size_t>(count)]);
    for (int i = 0; i < count; ++i) source[static_cast<size_t>(i)] = round_to<T>(static_cast<accumulate_t<T>>(i + 1));
    const auto vector = load_partial(source.get(), count);
    for (int lane = 0; lane < kStep<T>; ++lane) wrong += vector[lane] != (lane < count ? lane + 1 : 0);

    const std::unique_ptr<T[]> target(new T[static_cast<size_t>(count)]);
    store_partial(target.get(), vector, count);
    for (int i = 0; i < count; ++i) wrong += to_accumulate(target[static_cast<size_t>(i)]) != i + 1;
  }
  return wrong;
}

// Compares vector loads and stores of a 16-bit type with scalar conversions, over all floats at steps of `stride`.
template <typename T>
int wrong_conversions(uint32_t stride) {
  int wrong = 0;
  for (uint64_t next = 0; next <= 0xffffffffu;) {
    float inputs[kLanes<float>], widened[kLanes<float>];
    T narrow[kLanes<float>];
    for (float& input : inputs) {
      input = bit_cast<float>(static_cast<uint32_t>(next));
      next += stride;
    }
    store(narrow, load(inputs));
    store(widened, load(narrow));
    for (int lane = 0; lane < kLanes<float>; ++lane) {
      if (inputs[lane] != inputs[lane]) {
        wrong += widened[lane] == widened[lane];
      } else {
        wrong += narrow[lane].bits != round_to<T>(inputs[lane]).bits;
        wrong += bit_cast<uint32_t>(widened[lane]) != bit_cast<uint32_t>(to_accumulate(narrow[lane]));
      }
    }
  }
  return wrong;
}

template <typename S>
S sum_of_lanes() {
  S values[kLanes<S>];
  for (int lane = 0; lane < kLanes<S>; ++lane) values[lane] = static_cast<S>(lane + 1);
  return sum_lanes(load(values)) - static_cast<S>(kLanes<S> * (kLanes<S> + 1) / 2);
}

struct Findings {
  double exp_error;
  int partial_float, partial_double, partial_bfloat16, partial_float16;
  int conversions_bfloat16, conversions_float16;
  double sums;
};

inline void find(Findings* findings) {
  *findings = {
      worst_exp_error(1009),
      wrong_partial_accesses<float>(),
      wrong_partial_accesses<double>(),
      wrong_partial_accesses<BFloat16>(),
      wrong_partial_accesses<Float16>(),
      wrong_conversions<BFloat16>(1013),
      wrong_conversions<Float16>(1013),
      static_cast<double>(sum_of_lanes<float>()) + sum_of_lanes<double>(),
  };
}

}  // namespace pymoe::cpu::PYMOE_ISA
