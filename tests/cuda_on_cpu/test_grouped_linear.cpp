// Tests grouped_linear and its gradients: compares the emulated CUDA kernels with the CPU kernels. Sums of small
// integers are exact in fp32, so results must agree bit for bit; for other numbers they agree up to rounding.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda_on_cpu/harness.h"
#include "kernels/grouped_linear.h"

using namespace pymoe;
using namespace pymoe::test;

namespace {

// A matrix of `rows` x `columns` in its own memory: row-major, column-major, or with gaps; at any alignment.
template <typename T>
struct Matrix {
  int64_t row_stride, column_stride;
  Buffer<T> buffer;

  static int64_t extent(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    return rows == 0 || columns == 0 ? 0 : (rows - 1) * row_stride + (columns - 1) * column_stride + 1;
  }
  Matrix(Random& random, int64_t rows, int64_t columns)
      : Matrix(random, rows, columns, random.between(0, 4), random.one_of<int64_t>({0, 0, 0, 1, 3})) {}
  Matrix(Random&, int64_t rows, int64_t columns, int64_t layout, int64_t shift)
      : row_stride(layout == 0   ? columns
                   : layout == 1 ? (columns + 15) / 8 * 8  // padded rows, aligned
                   : layout == 2 ? 1
                   : layout == 3 ? columns * 2
                                 : columns + 3),
        column_stride(layout == 2   ? (rows + 7) / 8 * 8
                      : layout == 3 ? 2
                                    : 1),
        buffer(extent(rows, columns, row_stride, column_stride), shift) {}
  MatrixView view() const { return {buffer.data(), row_stride, column_stride}; }
};

template <typename T>
void fill_integers(Buffer<T>& buffer, Random& random) {
  for (T& value : buffer) value = round_to<T>(static_cast<accumulate_t<T>>(random.between(-2, 2)));
}

// Returns offsets of E experts in `rows` rows; some experts are empty, and rows may be left over.
Buffer<int32_t> random_offsets(Random& random, int64_t experts, int64_t rows) {
  Buffer<int32_t> offsets(experts + 1);
  std::vector<int64_t> cuts;
  const int64_t used = random.chance(0.3) ? random.between(0, rows) : rows;
  for (int64_t e = 0; e < experts; ++e) cuts.push_back(random.chance(0.2) ? 0 : random.between(0, used));
  std::sort(cuts.begin(), cuts.end());
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] = static_cast<int32_t>(cuts[static_cast<size_t>(e)]);
  if (experts > 0) offsets[experts] = static_cast<int32_t>(used);
  return offsets;
}

// Returns the offsets that the CUDA kernel uses in place of any given offsets, valid or not.
Buffer<int32_t> bounds_of(const Buffer<int32_t>& offsets, int64_t rows) {
  Buffer<int32_t> bounds(offsets.size());
  bounds[0] = 0;
  for (int64_t e = 1; e < offsets.size(); ++e) {
    bounds[e] = std::max(bounds[e - 1], static_cast<int32_t>(std::min<int64_t>(offsets[e], rows)));
  }
  return bounds;
}

struct Shape {
  int64_t experts, rows, input, output;
};

Shape random_shape(Random& random) {
  return {random.between(1, size(6, 3)), random.between(0, size(200, 40)),
          random.chance(0.3) ? 8 * random.between(1, 12) : random.between(0, size(90, 40)),
          random.chance(0.3) ? 8 * random.between(1, size(24, 4)) : random.between(1, size(150, 40))};
}

// Returns the permitted |difference|: two roundings of half an ulp, and fp32 sums of `terms` normal numbers in
// different orders.
template <typename T>
void check_close(const Buffer<T>& found, const Buffer<T>& expected, int64_t terms) {
  const double ulp = sizeof(T) == 8 ? 2e-16 : sizeof(T) == 4 ? 1e-7 : std::is_same_v<T, Float16> ? 1e-3 : 8e-3;
  const double sum = (sizeof(T) == 8 ? 2e-16 : 1.2e-7) * 4 * static_cast<double>(terms + 1);
  CHECK(worst_error(found, expected, ulp, sum) <= 1.0);
}

template <typename T>
struct Problem {
  Shape shape;
  Matrix<T> x, grad, bias;
  Matrix<T> weight;  // (E N, H): the matrix of expert e begins at element weight_stride * e
  int64_t weight_stride;
  bool has_bias, exact, ordered;
  Buffer<int32_t> workspace, order;

  Problem(Random& random, Shape s, bool by_order = false)
      : shape(s),
        x(by_order ? Matrix<T>(random, s.rows, s.input, 0, random.one_of<int64_t>({0, 0, 1}))
                   : Matrix<T>(random, s.rows, s.input)),
        grad(by_order ? Matrix<T>(random, s.rows, s.output, 0, random.one_of<int64_t>({0, 0, 1}))
                      : Matrix<T>(random, s.rows, s.output)),
        bias(random, s.experts, s.output),
        weight(random, s.experts * s.output, s.input),
        weight_stride(s.output * weight.row_stride),
        has_bias(random.chance(0.5)),
        exact(random.chance(0.6)),
        ordered(by_order),
        workspace(cuda::grouped_linear_workspace(s.experts)),
        order(s.rows) {
    for (int64_t r = 0; r < s.rows; ++r) order[r] = static_cast<int32_t>(r);
    for (int64_t r = s.rows; r-- > 1;) std::swap(order[r], order[random.between(0, r)]);
    for (Buffer<T>* buffer : {&x.buffer, &grad.buffer, &bias.buffer, &weight.buffer}) {
      exact ? fill_integers(*buffer, random) : fill(*buffer, random, random.chance(0.1) ? 0.01 : 0.0);
    }
  }

  GroupedArguments common(const Buffer<int32_t>& offsets, Buffer<T>& out) {
    return {offsets.data(), out.data(),       shape.rows,
            shape.input,    shape.output,     shape.experts,
            dtype_of<T>(),  workspace.data(), ordered ? order.data() : nullptr};
  }
  GroupedLinearArguments forward(const Buffer<int32_t>& offsets, Buffer<T>& y) {
    return {common(offsets, y), x.view(), weight.view(), weight_stride, has_bias ? bias.view() : MatrixView{}};
  }
  GroupedLinearArguments input_grad(const Buffer<int32_t>& offsets, Buffer<T>& dx) {
    GroupedLinearArguments a{common(offsets, dx),
                             grad.view(),
                             {weight.buffer.data(), weight.column_stride, weight.row_stride},
                             weight_stride,
                             {}};
    std::swap(a.input_features, a.output_features);
    return a;
  }
  GroupedWeightGradArguments weight_grad(const Buffer<int32_t>& offsets, Buffer<T>& dw) {
    return {common(offsets, dw), grad.view(), x.view()};
  }
  GroupedBiasGradArguments bias_grad(const Buffer<int32_t>& offsets, Buffer<T>& db) {
    return {common(offsets, db), grad.view()};
  }

  void compare(const Buffer<T>& found, const Buffer<T>& expected, int64_t terms) const {
    CHECK(found.intact());
    if (exact) {
      CHECK(found.same(expected));
    } else {
      check_close(found, expected, terms);
    }
  }

  // Compares all four products: the CUDA kernels get `offsets`, the CPU kernels `bounds`.
  void check(Random& random, const Buffer<int32_t>& offsets, const Buffer<int32_t>& bounds) {
    const int64_t shift = random.chance(0.3) ? random.between(1, 3) : 0;
    const auto [experts, rows, input, output] = shape;
    for (int64_t r = bounds[experts]; r < rows; ++r) order[r] = random.one_of<int32_t>({-1, 0, INT32_MIN, INT32_MAX});
    Buffer<T> y(rows * output, shift), expected_y(rows * output);
    cuda::grouped_linear(forward(offsets, y), nullptr);
    cpu::grouped_linear(forward(bounds, expected_y));
    compare(y, expected_y, input);
    Buffer<T> dx(rows * input, shift), expected_dx(rows * input);
    cuda::grouped_linear(input_grad(offsets, dx), nullptr);
    cpu::grouped_linear(input_grad(bounds, expected_dx));
    compare(dx, expected_dx, output);
    Buffer<T> dw(experts * output * input, shift), expected_dw(experts * output * input);
    cuda::grouped_linear_weight_grad(weight_grad(offsets, dw), nullptr);
    cpu::grouped_linear_weight_grad(weight_grad(bounds, expected_dw));
    compare(dw, expected_dw, rows);
    Buffer<T> db(experts * output, shift), expected_db(experts * output);
    cuda::grouped_linear_bias_grad(bias_grad(offsets, db), nullptr);
    cpu::grouped_linear_bias_grad(bias_grad(bounds, expected_db));
    compare(db, expected_db, rows);
    CHECK(workspace.intact());
  }
};

}  // namespace

TEST_CASE("grouped_linear: the emulated kernels equal the CPU twins in any shape, layout and dtype") {
  for_cases("grouped_linear", 60, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      Problem<typename decltype(tag)::type> problem(random, random_shape(random));
      const auto offsets = random_offsets(random, problem.shape.experts, problem.shape.rows);
      problem.check(random, offsets, offsets);
    });
  });
}

// Few experts with many rows, so that the larger tiles are used, and more of them than a band holds.
TEST_CASE("grouped_linear: large tiles equal the CPU twins in any shape, layout and dtype, by order too") {
  for_cases("grouped_linear large", 24, [](Random& random) {
    const auto check = [&](auto tag) {
      Shape shape = random_shape(random);
      shape.experts = random.between(1, 2);
      shape.rows = 128 * shape.experts + random.between(0, size(200, 20));
      if (random.chance(0.1)) shape = {1, 128 * 9 + 1, 8, 136};
      Problem<typename decltype(tag)::type> problem(random, shape, random.chance(0.3));
      const auto offsets = random_offsets(random, shape.experts, shape.rows);
      problem.check(random, offsets, offsets);
    };
    random.chance(0.5) ? check(TypeTag<BFloat16>{}) : check(TypeTag<Float16>{});
  });
}

TEST_CASE("grouped_linear: a row's bits do not depend on the rows beside it, nor on the size of the tiles") {
  for_cases("grouped_linear alone", 12, [](Random& random) {
    const auto check = [&](auto tag) {
      using T = typename decltype(tag)::type;
      Shape shape = random_shape(random);
      shape.experts = 1;
      shape.rows = 128 + random.between(0, 40);
      Problem<T> many(random, shape, false);
      const auto [experts, rows, input, output] = shape;
      fill(many.x.buffer, random, 0.0);
      fill(many.weight.buffer, random, 0.0);
      Buffer<int32_t> offsets(2), one(2);
      offsets[0] = one[0] = 0;
      offsets[1] = static_cast<int32_t>(rows);
      one[1] = 1;
      Buffer<T> y(rows * output), alone(output);
      cuda::grouped_linear(many.forward(offsets, y), nullptr);
      for (const int64_t row : {int64_t{0}, random.between(0, rows - 1), rows - 1}) {
        auto arguments = many.forward(one, alone);
        arguments.rows = 1;
        arguments.x.data = many.x.buffer.data() + row * many.x.row_stride;
        cuda::grouped_linear(arguments, nullptr);
        bool same = true;
        for (int64_t i = 0; i < output; ++i) same = same && memcmp(&alone[i], &y[row * output + i], sizeof(T)) == 0;
        CHECK(same);
      }
    };
    random.chance(0.5) ? check(TypeTag<BFloat16>{}) : check(TypeTag<Float16>{});
  });
}

TEST_CASE("grouped_linear: offsets that hold anything touch no row outside, and the others are right") {
  for_cases("grouped_linear hostile", 30, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      Problem<typename decltype(tag)::type> problem(random, random_shape(random));
      auto offsets = random_offsets(random, problem.shape.experts, problem.shape.rows);
      const auto rows = static_cast<int32_t>(problem.shape.rows);
      for (int32_t& offset : offsets) {
        if (random.chance(0.4)) {
          offset = random.one_of<int32_t>({-1, -2, rows, rows + 1, INT32_MIN, INT32_MAX, rows / 2, 0});
        }
      }
      problem.check(random, offsets, bounds_of(offsets, rows));
    });
  });
}

TEST_CASE("grouped_linear: rows that an order gives, in any shape and dtype, with offsets right and wrong") {
  for_cases("grouped_linear order", 60, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      Problem<typename decltype(tag)::type> problem(random, random_shape(random), true);
      auto offsets = random_offsets(random, problem.shape.experts, problem.shape.rows);
      if (random.chance(0.3))
        offsets[random.between(0, problem.shape.experts)] = random.one_of<int32_t>({-1, INT32_MAX});
      problem.check(random, offsets, bounds_of(offsets, problem.shape.rows));
    });
  });
}

TEST_CASE("grouped_linear: every bit of rows that an order gives is that of sorted rows") {
  for_cases("grouped_linear order bits", 24, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      Problem<T> problem(random, random_shape(random), true);
      const auto [experts, rows, input, output] = problem.shape;
      auto offsets = random_offsets(random, experts, rows);
      offsets[experts] = static_cast<int32_t>(rows);
      for (T& value : problem.x.buffer)
        value = round_to<T>(static_cast<accumulate_t<T>>(random.between(-99, 99) / 7.0));
      const auto gathered = [&](const Buffer<T>& from, int64_t width) {
        Buffer<T> to(rows * width);
        for (int64_t i = 0; i < to.size(); ++i) to[i] = from[problem.order[i / width] * width + i % width];
        return to;
      };
      const auto sorted_x = gathered(problem.x.buffer, input), sorted_grad = gathered(problem.grad.buffer, output);
      Buffer<T> y(rows * output), sorted_y(rows * output), dw(experts * output * input), sorted_dw(dw.size());
      Buffer<T> db(experts * output), sorted_db(db.size());
      cuda::grouped_linear(problem.forward(offsets, y), nullptr);
      cuda::grouped_linear_weight_grad(problem.weight_grad(offsets, dw), nullptr);
      cuda::grouped_linear_bias_grad(problem.bias_grad(offsets, db), nullptr);
      problem.ordered = false;
      auto linear = problem.forward(offsets, sorted_y);
      linear.x.data = sorted_x.data();
      cuda::grouped_linear(linear, nullptr);
      cuda::grouped_linear_weight_grad(
          {problem.common(offsets, sorted_dw), {sorted_grad.data(), output, 1}, {sorted_x.data(), input, 1}}, nullptr);
      cuda::grouped_linear_bias_grad({problem.common(offsets, sorted_db), {sorted_grad.data(), output, 1}}, nullptr);
      CHECK(gathered(y, output).same(sorted_y));
      CHECK(dw.same(sorted_dw));
      CHECK(db.same(sorted_db));
    });
  });
}

TEST_CASE("grouped_linear: rows that an order names and that do not exist are left out") {
  for_cases("grouped_linear hostile order", 30, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      Problem<T> problem(random, random_shape(random), true);
      const auto [experts, rows, input, output] = problem.shape;
      const auto offsets = random_offsets(random, experts, rows);
      for (Buffer<T>* buffer :
           {&problem.x.buffer, &problem.grad.buffer, &problem.bias.buffer, &problem.weight.buffer}) {
        fill_integers(*buffer, random);
      }
      Buffer<T> expected_y(rows * output), y(rows * output), expected_dw(experts * output * input);
      Buffer<T> dw(expected_dw.size()), db(experts * output), expected_db(db.size());
      cpu::grouped_linear(problem.forward(offsets, expected_y));
      const std::vector<int32_t> good(problem.order.begin(), problem.order.end());
      for (int64_t place = 0; place < offsets[experts]; ++place) {
        if (!random.chance(0.3)) continue;
        const int64_t row = good[static_cast<size_t>(place)];
        problem.order[place] =
            random.one_of<int32_t>({-1, -2, static_cast<int32_t>(rows), INT32_MIN, INT32_MAX, 1 << 30});
        for (int64_t i = 0; i < output; ++i) problem.grad.buffer[row * output + i] = expected_y[row * output + i] = T{};
      }
      cuda::grouped_linear(problem.forward(offsets, y), nullptr);
      for (int64_t place = 0; place < offsets[experts]; ++place) {
        const int64_t row = good[static_cast<size_t>(place)], at = row * output;
        if (problem.order[place] != row) continue;
        CHECK(memcmp(&y[at], &expected_y[at], static_cast<size_t>(output) * sizeof(T)) == 0);
      }
      CHECK(y.intact());
      cuda::grouped_linear_weight_grad(problem.weight_grad(offsets, dw), nullptr);
      cuda::grouped_linear_bias_grad(problem.bias_grad(offsets, db), nullptr);
      std::copy(good.begin(), good.end(), problem.order.begin());
      cpu::grouped_linear_weight_grad(problem.weight_grad(offsets, expected_dw));
      cpu::grouped_linear_bias_grad(problem.bias_grad(offsets, expected_db));
      CHECK(dw.same(expected_dw));
      CHECK(db.same(expected_db));
    });
  });
}

TEST_CASE("grouped_linear: hundreds of experts, and none") {
  for_cases("grouped_linear experts", 6, [](Random& random) {
    const int64_t experts = random.one_of<int64_t>({0, 1, 255, 256, 257, size(1100, 300)});
    Problem<BFloat16> problem(random, {experts, random.between(0, size(300, 30)), 5, 3});
    const auto offsets = random_offsets(random, experts, problem.shape.rows);
    problem.check(random, offsets, offsets);
  });
}

TEST_CASE("grouped_linear: a row's bits do not depend on the rows around it") {
  for_cases("grouped_linear rows", 6, [](Random& random) {
    with_random_dtype(random, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t rows = random.between(2, 150), input = random.between(1, 200), output = 40;
      Buffer<T> x(rows * input), weight(output * input), y(rows * output), alone(output);
      Buffer<int32_t> workspace(cuda::grouped_linear_workspace(1)), all(2), one(2);
      fill(x, random);
      fill(weight, random);
      all[0] = one[0] = 0, all[1] = static_cast<int32_t>(rows), one[1] = 1;
      GroupedLinearArguments a{{all.data(), y.data(), rows, input, output, 1, dtype_of<T>(), workspace.data()},
                               {x.data(), input, 1},
                               {weight.data(), input, 1},
                               0,
                               {}};
      cuda::grouped_linear(a, nullptr);
      const int64_t row = random.between(0, rows - 1);
      a.x.data = x.data() + row * input, a.offsets = one.data(), a.out = alone.data(), a.rows = 1;
      cuda::grouped_linear(a, nullptr);
      CHECK(memcmp(alone.data(), y.data() + row * output, static_cast<size_t>(output) * sizeof(T)) == 0);
    });
  });
}

namespace {

template <typename T>
void check_far_strides(Random& random) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const int64_t far = (int64_t{1} << 31) + 8, experts = 2, rows = 3, input = 16, output = 8;
  SparseMemory x(3 * far * kBytes), weight(3 * far * kBytes), grad(3 * far * kBytes);
  const auto at = [](const SparseMemory& memory, int64_t i) -> T& { return static_cast<T*>(memory.data())[i]; };
  Buffer<T> near_x(rows * input), near_weight(experts * output * input), near_grad(rows * output);
  for (Buffer<T>* buffer : {&near_x, &near_weight, &near_grad}) fill_integers(*buffer, random);
  for (int64_t i = 0; i < near_x.size(); ++i) at(x, i / input * far + i % input) = near_x[i];
  for (int64_t i = 0; i < near_grad.size(); ++i) at(grad, i / output * far + i % output) = near_grad[i];
  for (int64_t i = 0; i < near_weight.size(); ++i) {
    at(weight, i / (output * input) * far + i % (output * input)) = near_weight[i];
  }
  Buffer<int32_t> offsets(3), workspace(cuda::grouped_linear_workspace(experts));
  offsets[0] = 0, offsets[1] = 1, offsets[2] = 3;
  Buffer<T> y(rows * output), expected_y(rows * output), dw(near_weight.size()), expected_dw(near_weight.size());
  Buffer<T> db(experts * output), expected_db(experts * output);
  const auto common = [&](Buffer<T>& out) {
    return GroupedArguments{offsets.data(), out.data(), rows, input, output, experts, dtype_of<T>(), workspace.data()};
  };
  cuda::grouped_linear({common(y), {x.data(), far, 1}, {weight.data(), input, 1}, far, {}}, nullptr);
  cpu::grouped_linear(
      {common(expected_y), {near_x.data(), input, 1}, {near_weight.data(), input, 1}, output * input, {}});
  CHECK(y.same(expected_y));
  cuda::grouped_linear_weight_grad({common(dw), {grad.data(), far, 1}, {x.data(), far, 1}}, nullptr);
  cpu::grouped_linear_weight_grad({common(expected_dw), {near_grad.data(), output, 1}, {near_x.data(), input, 1}});
  CHECK(dw.same(expected_dw));
  cuda::grouped_linear_bias_grad({common(db), {grad.data(), far, 1}}, nullptr);
  cpu::grouped_linear_bias_grad({common(expected_db), {near_grad.data(), output, 1}});
  CHECK(db.same(expected_db));
}

}  // namespace

// Covers both kinds of tile, one for 16-bit floats and one for float32.
TEST_CASE("grouped_linear: strides past 2^31 elements") {
  for_cases("grouped_linear far", 6, check_far_strides<BFloat16>);
  for_cases("grouped_linear far", 6, check_far_strides<float>);
}

TEST_CASE("grouped_linear: a plan is the offsets made safe, and a foreign product is completed by it") {
  for_cases("grouped_linear complete", 24, [](Random& random) {
    using T = BFloat16;
    const bool many = random.chance(0.25);  // more than the plan's block has threads
    const Shape shape{many ? 300 : random.between(1, 40), random.between(0, size(300, 40)), 8 * random.between(1, 3),
                      8 * random.between(1, many ? 2 : size(40, 3))};
    const auto [experts, rows, input, output] = shape;
    auto offsets = random_offsets(random, experts, rows);
    if (random.chance(0.3)) offsets[random.between(0, experts)] = random.one_of<int32_t>({-7, INT32_MIN, INT32_MAX});
    if (many) offsets[random.between(1, 250)] = INT32_MAX;
    const auto bounds = bounds_of(offsets, rows);
    Problem<T> problem(random, shape);
    Buffer<T> y(rows * output), expected(rows * output);
    cuda::plan_grouped_linear(problem.forward(offsets, y), nullptr);
    for (int64_t e = 0; e <= experts; ++e) CHECK(problem.workspace[e] == bounds[e]);
    fill(y, random);
    int64_t expert = 0;
    for (int64_t i = 0; i < y.size(); ++i) {
      while (expert < experts && i / output >= bounds[expert + 1]) ++expert;
      expected[i] = expert == experts ? T{0} : y[i];
    }
    cuda::complete_grouped_linear(problem.forward(offsets, y), nullptr);
    CHECK(y.same(expected));
    CHECK(y.intact());
    Buffer<T> dw(experts * output * input), expected_dw(experts * output * input);
    fill(dw, random);
    for (int64_t i = 0; i < dw.size(); ++i) {
      const int64_t e = i / (output * input);
      expected_dw[i] = bounds[e] == bounds[e + 1] ? T{0} : dw[i];
    }
    cuda::complete_grouped_weight_grad(problem.weight_grad(offsets, dw), nullptr);
    CHECK(dw.same(expected_dw));
    CHECK(dw.intact());
  });
}
