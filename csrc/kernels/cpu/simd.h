// Vectors of the instruction set being compiled (see for_each_isa.h; no include guard on purpose).
//
// `vector_t<S>` has kLanes<S> elements of S = float or double. load and store convert from and to the storage types:
// bf16 and fp16 are widened to float, and float is rounded to them, to nearest even. The partial forms access only
// `count` elements; load_partial fills the other lanes with zeros. All arithmetic is plain IEEE, in the order written
// (the build turns contraction off), so an element's result does not depend on the instruction set unless it is a sum
// over lanes.

namespace pymoe::cpu::PYMOE_ISA {

#if PYMOE_ISA_LEVEL == 4
inline constexpr int kVectorBytes = 64;
#elif PYMOE_ISA_LEVEL == 3
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename S>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(S));

typedef float vfloat __attribute__((vector_size(kVectorBytes)));
typedef double vdouble __attribute__((vector_size(kVectorBytes)));
typedef int32_t vint32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t vuint32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t vhalf16 __attribute__((vector_size(kVectorBytes / 2)));  // with as many lanes as vfloat

// The type of the vectors in which elements stored as T are accumulated.
template <typename T>
using vector_t = std::conditional_t<std::is_same_v<T, double>, vdouble, vfloat>;
// Number of elements of T that fill one vector of the type in which they are summed.
template <typename T>
inline constexpr int kStep = kLanes<accumulate_t<T>>;

PYMOE_INLINE vfloat broadcast(float value) { return value - vfloat{}; }
PYMOE_INLINE vdouble broadcast(double value) { return value - vdouble{}; }

// --- loads ---

PYMOE_INLINE vfloat load(const float* source) {
  vfloat value;
  memcpy(&value, source, sizeof(value));
  return value;
}

PYMOE_INLINE vdouble load(const double* source) {
  vdouble value;
  memcpy(&value, source, sizeof(value));
  return value;
}

// The conversions of 16-bit floats use intrinsics wherever the instruction set has them, because compilers turn
// __builtin_convertvector between 16 and 32 bits into scalar code.
PYMOE_INLINE vfloat load(const BFloat16* source) {
#if PYMOE_ISA_LEVEL == 4
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif PYMOE_ISA_LEVEL == 3
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#elif PYMOE_MULTIVERSION
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return (vfloat)_mm_unpacklo_epi16(_mm_setzero_si128(), bits);
#else
  vhalf16 bits;
  memcpy(&bits, source, sizeof(bits));
#if PYMOE_NEON
  return (vfloat)vshll_n_u16((uint16x4_t)bits, 16);
#else
  return (vfloat)(__builtin_convertvector(bits, vuint32) << 16);
#endif
#endif
}

PYMOE_INLINE vfloat load(const Float16* source) {
#if PYMOE_ISA_LEVEL == 4
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif PYMOE_ISA_LEVEL == 3
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  vhalf16 narrow;
  memcpy(&narrow, source, sizeof(narrow));
#if PYMOE_NEON
  return (vfloat)vcvt_f32_f16((float16x4_t)narrow);
#else  // to_accumulate(Float16), lane by lane
  const vuint32 bits = __builtin_convertvector(narrow, vuint32);
  const vuint32 sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const vuint32 subnormal =
      (vuint32)(__builtin_convertvector((vint32)magnitude, vfloat) * bit_cast<float>(0x33800000u));  // * 2^-24
  const vuint32 is_subnormal = (vuint32)(magnitude < 0x400u);
  const vuint32 finite = (is_subnormal & subnormal) | (~is_subnormal & ((magnitude << 13) + 0x38000000u));
  const vuint32 special = ((magnitude & 0x3ffu) << 13) | 0x7f800000u;
  const vuint32 is_special = (vuint32)(magnitude >= 0x7c00u);
  return (vfloat)(sign | (is_special & special) | (~is_special & finite));
#endif
#endif
}

template <typename T>
PYMOE_INLINE vector_t<T> load_partial(const T* source, int count) {
  T padded[kStep<T>] = {};
  memcpy(padded, source, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

// --- stores ---

PYMOE_INLINE void store(float* target, vfloat value) { memcpy(target, &value, sizeof(value)); }
PYMOE_INLINE void store(double* target, vdouble value) { memcpy(target, &value, sizeof(value)); }

PYMOE_INLINE void store(BFloat16* target, vfloat value) {
  const vuint32 bits = (vuint32)value;
  const vuint32 is_nan = (vuint32)(value != value);
  const vuint32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const vuint32 kept = (is_nan & 0x7fc00000u) | (~is_nan & rounded);  // the result is in the upper half
#if PYMOE_ISA_LEVEL == 4
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)kept, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow);
#elif PYMOE_ISA_LEVEL == 3
  const __m256i shifted = _mm256_srli_epi32((__m256i)kept, 16);
  const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), narrow);
#elif PYMOE_MULTIVERSION
  const __m128i shifted = _mm_srai_epi32((__m128i)kept, 16);  // signed, so that the signed pack keeps every bit
  _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packs_epi32(shifted, shifted));
#else
#if PYMOE_NEON
  const auto narrow = (vhalf16)vshrn_n_u32((uint32x4_t)kept, 16);
#else
  const vhalf16 narrow = __builtin_convertvector(kept >> 16, vhalf16);
#endif
  memcpy(target, &narrow, sizeof(narrow));
#endif
}

PYMOE_INLINE void store(Float16* target, vfloat value) {
#if PYMOE_ISA_LEVEL == 4
  const __m256i narrow = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow);
#elif PYMOE_ISA_LEVEL == 3
  const __m128i narrow = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), narrow);
#elif PYMOE_NEON
  const float16x4_t narrow = vcvt_f16_f32((float32x4_t)value);
  memcpy(target, &narrow, sizeof(narrow));
#else  // round_to<Float16>, lane by lane
  const vuint32 bits = (vuint32)value, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const vuint32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const vuint32 subnormal = (vuint32)((vfloat)magnitude + 0.5f) - 0x3f000000u;
  const vuint32 is_small = (vuint32)(magnitude < 0x38800000u), is_large = (vuint32)(magnitude >= 0x477ff000u);
  const vuint32 is_nan = (vuint32)(magnitude > 0x7f800000u);
  const vuint32 finite = (is_small & subnormal) | (~is_small & normal);
  const vuint32 kept = (is_large & (0x7c00u | (is_nan & 0x200u))) | (~is_large & finite);
#if PYMOE_MULTIVERSION
  const __m128i moved = (__m128i)((sign | kept) << 16);  // sign-extended by both shifts, as the signed pack requires
  const __m128i shifted = _mm_srai_epi32(moved, 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packs_epi32(shifted, shifted));
#else
  const vhalf16 narrow = __builtin_convertvector(sign | kept, vhalf16);
  memcpy(target, &narrow, sizeof(narrow));
#endif
#endif
}

template <typename T>
PYMOE_INLINE void store_partial(T* target, vector_t<T> value, int count) {
  T padded[kStep<T>];
  store(padded, value);
  memcpy(target, padded, static_cast<size_t>(count) * sizeof(T));
}

// Calls f(first, count) for every vector of [0, size), in order; for the last one, `count` may be less than kStep<T>. f
// is compiled twice, so that only the last call has partial loads and stores.
template <typename T, typename F>
PYMOE_INLINE void for_vectors(int64_t size, const F& f) {
  int64_t first = 0;
  for (; first + kStep<T> <= size; first += kStep<T>) f(first, kStep<T>);
  if (first < size) f(first, static_cast<int>(size - first));
}

template <typename T>
PYMOE_INLINE vector_t<T> load_count(const T* source, int count) {
  return count == kStep<T> ? load(source) : load_partial(source, count);
}

template <typename T>
PYMOE_INLINE void store_count(T* target, vector_t<T> value, int count) {
  if (count == kStep<T>) {
    store(target, value);
  } else {
    store_partial(target, value, count);
  }
}

// Rounds the elements of `row`, of the accumulated dtype, to T and stores them.
template <typename T>
PYMOE_INLINE void store_row(T* target, const accumulate_t<T>* row, int64_t size) {
  for_vectors<T>(size,
                 [&](int64_t first, int count) { store_count(target + first, load_count(row + first, count), count); });
}

// Stores a row as store_row does, but bypasses the caches, so that the lines need not be read first; call stream_fence
// afterwards. Partial vectors, all vectors of an unaligned row, and all rows below level 3, are stored normally.
template <typename T>
PYMOE_INLINE void stream_row(T* target, const accumulate_t<T>* row, int64_t size) {
#if PYMOE_ISA_LEVEL >= 3
  constexpr int kBytes = kStep<T> * static_cast<int>(sizeof(T));
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % kBytes);
  int64_t i = 0;
  if (misaligned == 0) {
    for (; i + kStep<T> <= size; i += kStep<T>) {
      alignas(kBytes) T part[kStep<T>];
      store(part, load(row + i));
#if PYMOE_ISA_LEVEL == 4
      if constexpr (kBytes == 64) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_load_si512(part));
      }
#endif
      if constexpr (kBytes == 32) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                            _mm256_load_si256(reinterpret_cast<const __m256i*>(part)));
      }
      if constexpr (kBytes == 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                         _mm_load_si128(reinterpret_cast<const __m128i*>(part)));
      }
    }
  }
  store_row(target + i, row + i, size - i);
#else
  store_row(target, row, size);
#endif
}

PYMOE_INLINE void stream_fence() {
#if PYMOE_ISA_LEVEL >= 3
  _mm_sfence();
#endif
}

// --- lane-wise arithmetic ---

// Returns the maximum of each pair of lanes, or the lane of `b` if either is NaN.
PYMOE_INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
PYMOE_INLINE vdouble max(vdouble a, vdouble b) { return a > b ? a : b; }

// Returns the sum over lanes, added as a balanced tree: the order is fixed for a given instruction set.
template <typename Vector>
PYMOE_INLINE auto sum_lanes(Vector value) {
  constexpr int lanes = static_cast<int>(sizeof(Vector) / sizeof(value[0]));
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) value[lane] += value[lane + half];
  }
  return value[0];
}

// Returns e^x within 2 ulp. Every lane has the same bits as exp_in_fixed_steps in core/score.h, with any instruction
// set.
template <typename Vector>
PYMOE_INLINE Vector exp_vector(Vector x) {
  using S = std::remove_cvref_t<decltype(x[0])>;
  using Steps = ExpSteps<S>;
  using Integers = decltype(x < x);
  Vector clamped = x < Steps::kLow ? broadcast(Steps::kLow) : x;  // a NaN compares false and passes through
  clamped = clamped > Steps::kHigh ? broadcast(Steps::kHigh) : clamped;
  const Vector n = (clamped * Steps::kLog2E + Steps::kMagic) - Steps::kMagic;
  const Vector r = (clamped - n * Steps::kLn2High) - n * Steps::kLn2Low;
  Vector p = broadcast(Steps::polynomial(0));
  for (int i = 1; i < Steps::kTerms; ++i) p = p * r + Steps::polynomial(i);
  p = (p * (r * r) + r) + S{1};
  // Read the exponent from the bits of n + kMagic, which is exact, since |n| is below 2^22. The bits of a NaN are no
  // exponent; 0 takes its place.
  const Vector integral = x == x ? n : Vector{};
  const Integers exponent = (Integers)(integral + Steps::kMagic) - (Integers)broadcast(Steps::kMagic);
  const Integers half = exponent >> 1;
  const Vector scale_a = (Vector)((half + Steps::kBias) << Steps::kMantissa);
  const Vector scale_b = (Vector)((exponent - half + Steps::kBias) << Steps::kMantissa);
  return (p * scale_a) * scale_b;
}

PYMOE_INLINE vfloat exp(vfloat x) { return exp_vector(x); }
PYMOE_INLINE vdouble exp(vdouble x) { return exp_vector(x); }

}  // namespace pymoe::cpu::PYMOE_ISA
