// Packing for gemm (see gemm.h; no include guard on purpose).
//
// pack<kPanel>(source, item_stride, k_stride, items, k, target, ...) copies a matrix of `items` x `k` elements into
// panels of kPanel items, k-major within a panel. Their elements are those of Panel<T> (gemm_micro_kernel.h); each item
// has depth = ceil(k / kDepth) of them:
//
//     target[(item / kPanel) * kPanel * depth + p * kPanel + item % kPanel] = source[item * item_stride + p * k_stride]
//
// (written here for kDepth = 1), with zeros for missing items of the last panel, and for the second half of a pair past
// the end of k. Items are rows of A or columns of B. If elements along k are contiguous, blocks are transposed in
// registers; if items are contiguous, vectors are copied. The vectors of a step may be wider than the panel: the
// surplus is written where the next step writes, so `target` needs room for kPackSlack elements past its end. An order
// of items requires items that are contiguous along k; an order of steps requires that a step's items are contiguous
// (gemm.h).

namespace pymoe::cpu::PYMOE_ISA {

inline constexpr int64_t kPackSlack = 16;
inline constexpr int64_t kPackMaxDepth = 512;  // largest number of panel elements of an item in one call

// Number of elements of S in 16 bytes. Blocks are transposed in parts of this size, because shuffles are cheap only
// within a 128-bit part of a vector.
template <typename S>
inline constexpr int kPart = 16 / static_cast<int>(sizeof(S));

// Returns a 16-byte vector of the baseline instruction set from the elements at `source`: widened, or as four pairs.
template <typename T>
PYMOE_INLINE baseline::vector_t<T> load_part(const T* source) {
  if constexpr (Panel<T>::kDepth == 2) {
    baseline::vector_t<T> pairs;
    memcpy(&pairs, source, sizeof(pairs));
    return pairs;
  }
#if PYMOE_ISA_LEVEL >= 3
  if constexpr (std::is_same_v<T, Float16>) {
    return (baseline::vfloat)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
  }
#endif
  return baseline::load(source);
}

// Returns the vector [part of rows[0], part of rows[step], part of rows[2 * step], ...], where each part starts at
// element p of its row.
template <typename T>
PYMOE_INLINE vector_t<T> gather_parts(const T* const* rows, int step, int64_t p) {
  using Vector = vector_t<T>;
  Vector vector;
#if PYMOE_ISA_LEVEL == 1
  (void)step;
  vector = load_part(rows[0] + p);
#else
  const auto low = load_part(rows[0] + p);
  const auto high = load_part(rows[step] + p);
  const auto pair = [](auto a, auto b) {
    if constexpr (sizeof(a[0]) == 4) {
      return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
    } else {
      return __builtin_shufflevector(a, b, 0, 1, 2, 3);
    }
  };
#if PYMOE_ISA_LEVEL == 3
  vector = (Vector)pair(low, high);
#else
  const auto lower = pair(low, high);
  const auto upper = pair(load_part(rows[2 * step] + p), load_part(rows[3 * step] + p));
  if constexpr (sizeof(lower[0]) == 4) {
    vector = (Vector)__builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  } else {
    vector = (Vector)__builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7);
  }
#endif
#endif
  return vector;
}

// Shuffles two vectors by a rule that is the same for every 128-bit part: lane i of a part takes lane rule(i), where
// lanes 0 .. part - 1 are those of a's part and lanes part .. 2 * part - 1 those of b's.
template <typename Vector, typename Rule>
PYMOE_INLINE Vector shuffle_parts(Vector a, Vector b, Rule rule) {
  constexpr int lanes = static_cast<int>(sizeof(Vector) / sizeof(a[0]));
  constexpr int part = static_cast<int>(16 / sizeof(a[0]));
  return [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    return __builtin_shufflevector(
        a, b, (i / part * part + Rule{}(i % part) % part + (Rule{}(i % part) >= part ? lanes : 0))...);
  }
  (std::make_integer_sequence<int, lanes>{});
}

// Transposes the square block that the vectors contain in each 128-bit part.
PYMOE_INLINE void transpose_parts(vfloat (&v)[4]) {
  const auto interleave_low = [](int i) constexpr { return (i % 2) * 4 + i / 2; };
  const auto interleave_high = [](int i) constexpr { return (i % 2) * 4 + i / 2 + 2; };
  const auto pair_low = [](int i) constexpr { return i / 2 * 4 + i % 2; };
  const auto pair_high = [](int i) constexpr { return i / 2 * 4 + i % 2 + 2; };
  const vfloat a = shuffle_parts(v[0], v[1], interleave_low), b = shuffle_parts(v[0], v[1], interleave_high);
  const vfloat c = shuffle_parts(v[2], v[3], interleave_low), d = shuffle_parts(v[2], v[3], interleave_high);
  v[0] = shuffle_parts(a, c, pair_low);
  v[1] = shuffle_parts(a, c, pair_high);
  v[2] = shuffle_parts(b, d, pair_low);
  v[3] = shuffle_parts(b, d, pair_high);
}

#if PYMOE_ISA_LEVEL == 4
// even_parts returns the 128-bit parts 0 and 2 of both vectors, odd_parts returns parts 1 and 3.
PYMOE_INLINE vfloat even_parts(vfloat a, vfloat b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
PYMOE_INLINE vfloat odd_parts(vfloat a, vfloat b) {
  return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Transposes a square block, which has as many rows as a vector has lanes.
PYMOE_INLINE void transpose(vfloat (&v)[16]) {
  vfloat part[4][4];  // [i][j]: of rows 4 i .. 4 i + 3, columns j, 4 + j, 8 + j and 12 + j
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) part[i][j] = v[4 * i + j];
    transpose_parts(part[i]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const vfloat a = even_parts(part[0][j], part[1][j]), b = even_parts(part[2][j], part[3][j]);
    const vfloat c = odd_parts(part[0][j], part[1][j]), d = odd_parts(part[2][j], part[3][j]);
    v[j] = even_parts(a, b);
    v[4 + j] = even_parts(c, d);
    v[8 + j] = odd_parts(a, b);
    v[12 + j] = odd_parts(c, d);
  }
}
#elif PYMOE_ISA_LEVEL == 3
PYMOE_INLINE void transpose(vfloat (&v)[8]) {
  vfloat part[2][4];  // [i][j]: of rows 4 i .. 4 i + 3, columns j and 4 + j
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) part[i][j] = v[4 * i + j];
    transpose_parts(part[i]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    v[j] = __builtin_shufflevector(part[0][j], part[1][j], 0, 1, 2, 3, 8, 9, 10, 11);
    v[4 + j] = __builtin_shufflevector(part[0][j], part[1][j], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#endif

PYMOE_INLINE void transpose_parts(vdouble (&v)[2]) {
  const vdouble a = shuffle_parts(v[0], v[1], [](int i) constexpr { return 2 * i; });
  v[1] = shuffle_parts(v[0], v[1], [](int i) constexpr { return 2 * i + 1; });
  v[0] = a;
}

// Returns the panel element made of source[0] and, for pairs, source[k_stride], or zero in its place if only one
// element of k is left (`left` == 1).
template <typename T>
PYMOE_INLINE panel_t<T> panel_element(const T* source, int64_t k_stride, int64_t left) {
  if constexpr (Panel<T>::kDepth == 2) {
    return source[0].bits | static_cast<uint32_t>(left > 1 ? source[k_stride].bits : 0) << 16;
  } else {
    return to_accumulate(source[0]);
  }
}

// Returns the panel elements of as many contiguous items as a vector has lanes; see panel_element for `left`.
template <typename T>
PYMOE_INLINE vector_t<T> panel_vector(const T* source, int64_t k_stride, int64_t left) {
#if PYMOE_ISA_HAS_BF16
  if constexpr (Panel<T>::kDepth == 2) {
    const vuint32 low = (vuint32)load(source) >> 16;  // bf16 is the upper half of a float
    return (vfloat)(left > 1 ? low | (vuint32)load(source + k_stride) : low);
  }
#endif
  return load(source);
}

#if PYMOE_ISA_HAS_BF16
// The order that interleaves two rows of 32 elements as 32 pairs.
struct PairOrder {
  alignas(64) uint16_t index[64];
  constexpr PairOrder() : index{} {
    for (int i = 0; i < 64; ++i) index[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
  }
};
inline constexpr PairOrder kPairOrder;
#endif

// Loads two vectors of panel elements from contiguous items; see panel_element for `left`.
template <typename T>
PYMOE_INLINE void load_two(const T* source, int64_t k_stride, int64_t left, vector_t<T>* two) {
#if PYMOE_ISA_HAS_BF16
  if constexpr (Panel<T>::kDepth == 2) {
    const __m512i low = _mm512_loadu_si512(source);
    const __m512i high = left > 1 ? _mm512_loadu_si512(source + k_stride) : _mm512_setzero_si512();
    two[0] = (vfloat)_mm512_permutex2var_epi16(low, _mm512_load_si512(kPairOrder.index), high);
    two[1] = (vfloat)_mm512_permutex2var_epi16(low, _mm512_load_si512(kPairOrder.index + 32), high);
    return;
  }
#endif
  two[0] = panel_vector(source, k_stride, left);
  two[1] = panel_vector(source + kStep<T>, k_stride, left);
}

// Stores a vector of panel elements unchanged.
template <typename T>
PYMOE_INLINE void store_panel(panel_t<T>* target, vector_t<T> value) {
  memcpy(target, &value, sizeof(value));
}

// Packs a matrix whose elements along k are contiguous. If a step of a panel is a whole number of vectors, the panel's
// rows are read a cache line at a time, and no more rows together than a vector has lanes: rows a power of two apart
// share a set of the first-level cache, which has room for only a few lines.
template <int kPanel, typename T>
void pack_transposed(const T* source, int64_t item_stride, int64_t items, int64_t k, panel_t<T>* target,
                     const int32_t* order) {
  using S = accumulate_t<T>;
  constexpr int kWidth = kLanes<S>;
  constexpr int kGroups = (kPanel + kWidth - 1) / kWidth;
  constexpr int kDepth = Panel<T>::kDepth;
  constexpr int64_t kLine = std::min<int64_t>(64 / (kDepth * static_cast<int64_t>(sizeof(T))), 16);
  alignas(64) static const T zeros[kPackMaxDepth * kDepth] = {};
  const int64_t depth = (k + kDepth - 1) / kDepth, whole = k / kDepth;
  for (int64_t first = 0; first < items; first += kPanel, target += kPanel * depth) {
    const T* rows[kGroups * kWidth];
    for (int i = 0; i < kGroups * kWidth; ++i) {
      rows[i] = i < kPanel && first + i < items ? source + place_of(order, first + i) * item_stride : zeros;
    }
    int64_t p = 0;
    if constexpr (kPanel % kWidth == 0) {
      for (; p + kLine <= whole; p += kLine) {
        for (int group = 0; group < kGroups; ++group) {
#pragma GCC unroll 16
          for (int64_t q = 0; q < kLine; q += kPart<S>) {
            vector_t<T> block[kPart<S>];
#pragma GCC unroll 16
            for (int i = 0; i < kPart<S>; ++i) {
              block[i] = gather_parts(rows + group * kWidth + i, kPart<S>, (p + q) * kDepth);
            }
            transpose_parts(block);
#pragma GCC unroll 16
            for (int i = 0; i < kPart<S>; ++i) {
              store_panel<T>(target + (p + q + i) * kPanel + group * kWidth, block[i]);
            }
          }
        }
      }
    }
    for (; p + kPart<S> <= whole; p += kPart<S>) {  // ascending: each step overwrites the previous step's surplus
      vector_t<T> block[kGroups][kPart<S>];
      for (int group = 0; group < kGroups; ++group) {
#pragma GCC unroll 16
        for (int i = 0; i < kPart<S>; ++i) {
          block[group][i] = gather_parts(rows + group * kWidth + i, kPart<S>, p * kDepth);
        }
        transpose_parts(block[group]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kPart<S>; ++i) {
        for (int group = 0; group < kGroups; ++group) {
          store_panel<T>(target + (p + i) * kPanel + group * kWidth, block[group][i]);
        }
      }
    }
    for (; p < depth; ++p) {
      for (int i = 0; i < kPanel; ++i) {
        target[p * kPanel + i] = panel_element(rows[i] + p * kDepth, 1, k - p * kDepth);
      }
    }
  }
}

// Packs a matrix whose items are contiguous. A few steps of k are packed into all panels before the next few steps, so
// that the lines of both source and target stay in the cache.
template <int kPanel, typename T>
void pack_copied(const T* source, int64_t k_stride, int64_t items, int64_t k, panel_t<T>* target,
                 const int32_t* steps) {
  constexpr int kWidth = kLanes<accumulate_t<T>>;
  constexpr int kGroups = (kPanel + kWidth - 1) / kWidth;
  constexpr int kDepth = Panel<T>::kDepth;
  constexpr int64_t kSteps = 8;
  const int64_t depth = (k + kDepth - 1) / kDepth;
  for (int64_t p0 = 0; p0 < depth; p0 += kSteps) {
    const int64_t p1 = p0 + kSteps < depth ? p0 + kSteps : depth;
    const T* begins[kSteps];    // the first item of each step
    int64_t to_second[kSteps];  // distance to the second elements of the pairs
    for (int64_t p = p0; p < p1; ++p) {
      const int64_t place = place_of(steps, p * kDepth);
      begins[p - p0] = source + place * k_stride;
      to_second[p - p0] = (place_of(steps, std::min(p * kDepth + 1, k - 1)) - place) * k_stride;
    }
    panel_t<T>* panel = target;
    for (int64_t first = 0; first < items; first += kPanel, panel += kPanel * depth) {
      const auto element = [&](int64_t p, int64_t i) {
        return panel_element(begins[p - p0] + first + i, to_second[p - p0], k - p * kDepth);
      };
      if (first + kGroups * kWidth <= items) {
        // The last vector of a step may reach into the next step. After a panel's last step, that is the first step of
        // the next panel, which may be packed already; so the last step is stored separately below.
        const int64_t whole = kGroups * kWidth == kPanel || p1 < depth ? p1 : p1 - 1;
        for (int64_t p = p0; p < whole; ++p) {
          vector_t<T> step[kGroups];
          if constexpr (kGroups == 2) {
            load_two(begins[p - p0] + first, to_second[p - p0], k - p * kDepth, step);
          } else {
#pragma GCC unroll 16
            for (int group = 0; group < kGroups; ++group) {
              step[group] = panel_vector(begins[p - p0] + first + group * kWidth, to_second[p - p0], k - p * kDepth);
            }
          }
#pragma GCC unroll 16
          for (int group = 0; group < kGroups; ++group) {
            store_panel<T>(panel + p * kPanel + group * kWidth, step[group]);
          }
        }
        for (int64_t p = whole; p < p1; ++p) {
          for (int64_t i = 0; i < kPanel; ++i) panel[p * kPanel + i] = element(p, i);
        }
      } else {
        const int64_t count = items - first < kPanel ? items - first : kPanel;
        for (int64_t p = p0; p < p1; ++p) {
          for (int64_t i = 0; i < count; ++i) panel[p * kPanel + i] = element(p, i);
          for (int64_t i = count; i < kPanel; ++i) panel[p * kPanel + i] = {};
        }
      }
    }
  }
}

template <int kPanel, typename T>
void pack_strided(const T* source, int64_t item_stride, int64_t k_stride, int64_t items, int64_t k,
                  panel_t<T>* target) {
  for (int64_t first = 0; first < items; first += kPanel) {
    for (int64_t p = 0; p < k; p += Panel<T>::kDepth) {
      for (int64_t i = first; i < first + kPanel; ++i) {
        *target++ = i < items ? panel_element(source + i * item_stride + p * k_stride, k_stride, k - p) : panel_t<T>{};
      }
    }
  }
}

template <int kPanel, typename T>
void pack(const T* source, int64_t item_stride, int64_t k_stride, int64_t items, int64_t k, panel_t<T>* target,
          const int32_t* order = nullptr, const int32_t* steps = nullptr) {
  if (k_stride == 1 && steps == nullptr) {
    pack_transposed<kPanel>(source, item_stride, items, k, target, order);
  } else if (item_stride == 1) {
    pack_copied<kPanel>(source, k_stride, items, k, target, steps);
  } else {
    pack_strided<kPanel>(source, item_stride, k_stride, items, k, target);
  }
}

}  // namespace pymoe::cpu::PYMOE_ISA
