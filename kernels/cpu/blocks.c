// Products of rows with matrices in GGUF's blocks, in integers as in llama.cpp: every 32 numbers of
// a row are rounded to bytes with one scale, and the sum of a block's products is exact.
//
// A matrix is kept in tiles of LANES of its rows, so that each lane of a register sums one of them.
// What a row gives does not depend on the other rows, nor on the number of threads.

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define BLOCK 32
#define SMALLEST 1e-30f
#define LINE 64  // bytes of memory that are read at once
#define AHEAD 12  // blocks, so that the processor does not wait for memory
#define FOURS 8  // a block's numbers are multiplied four at a time
#define ALWAYS static inline __attribute__((always_inline))

enum { Q8_0, Q4_0, Q4_1 };

typedef struct {
  int kind;
  int64_t blocks;  // of a row
  const uint8_t *values;
  const uint16_t *scales, *minima;  // only Q4_1 has minima
} Matrix;

// A rounded row: of each block its bytes, its scale, its sum, and what undoes a matrix's shift.
typedef struct {
  int32_t *fours, *shifts;
  float *scales, *sums;
} Row;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#define SHIFT 128  // is added to the bytes of a matrix, so that they have no sign
#define AT_ONCE 8  // rows for which a block is read once
typedef __m512 Floats;
typedef __m512i Ints;
#define floats_of(one) _mm512_set1_ps(one)
#define multiply_add(a, b, c) _mm512_fmadd_ps(a, b, c)
#define store(to, found) _mm512_storeu_ps(to, found)
#define load(from) _mm512_loadu_si512(from)
#define low_halves(both) _mm512_and_si512(both, _mm512_set1_epi8(15))
#define shifted(both) _mm512_srli_epi16(both, 4)

ALWAYS Floats widened(const uint16_t *halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
}

ALWAYS Floats products(int kind, const Ints *block, const int32_t *x, int32_t shift) {
  (void)kind;
  Ints sums = _mm512_set1_epi32(shift);
  for (int f = 0; f < FOURS; f++) sums = _mm512_dpbusd_epi32(sums, block[f], _mm512_set1_epi32(x[f]));
  return _mm512_cvtepi32_ps(sums);
}
#else
#define LANES 8
#define SHIFT 0
#define AT_ONCE 4
typedef __m256 Floats;
typedef __m256i Ints;
#define floats_of(one) _mm256_set1_ps(one)
#define multiply_add(a, b, c) _mm256_fmadd_ps(a, b, c)
#define store(to, found) _mm256_storeu_ps(to, found)
#define load(from) _mm256_loadu_si256((const __m256i *)(from))
#define low_halves(both) _mm256_and_si256(both, _mm256_set1_epi8(15))
#define shifted(both) _mm256_srli_epi16(both, 4)

ALWAYS Floats widened(const uint16_t *halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

ALWAYS Floats products(int kind, const Ints *block, const int32_t *x, int32_t shift) {
  const Ints ones = _mm256_set1_epi16(1);
  Ints sums = _mm256_set1_epi32(shift), pairs = _mm256_setzero_si256();
  for (int f = 0; f < FOURS; f++) {
    const Ints four = _mm256_set1_epi32(x[f]);
    if (kind == Q8_0) {  // one side must have no sign, so signs move to the row
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(block[f]), _mm256_sign_epi8(four, block[f]));
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
    } else {  // 16 products of at most 15 * 127 fit
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(block[f], four));
    }
  }
  if (kind != Q8_0) sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
  return _mm256_cvtepi32_ps(sums);
}
#endif

ALWAYS void round_row(const float *x, const Matrix *m, Row row) {
  const int shift = m->kind == Q8_0 ? SHIFT : m->kind == Q4_0 ? 8 : 0;
  int8_t *to = (int8_t *)row.fours;
  for (int64_t b = 0; b < m->blocks; b++, x += BLOCK, to += BLOCK) {
    float most = 0;
    int finite = 1;
    for (int i = 0; i < BLOCK; i++) {
      most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
      finite &= fabsf(x[i]) <= FLT_MAX;
    }
    // Smaller numbers count as 0. NaN and infinite ones make all that they meet NaN.
    const float inverse = finite && most > SMALLEST ? 127 / most : 0;
    int sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += to[i] = inverse > 0 ? (int8_t)nearbyintf(x[i] * inverse) : 0;
    row.scales[b] = finite ? most / 127 : NAN;
    row.sums[b] = row.scales[b] * (float)sum;
    row.shifts[b] = -shift * sum;
  }
}

// The products of a tile with some rows, whose number the compiler knows.
ALWAYS void multiply(const Matrix *m, int64_t tile, const Row *rows, int count, float *out, int64_t width) {
  const int64_t bytes = LANES * (m->kind == Q8_0 ? BLOCK : BLOCK / 2);
  Floats sums[AT_ONCE];
  for (int r = 0; r < count; r++) sums[r] = floats_of(0);
  for (int64_t at = 0, b = tile * m->blocks; at < m->blocks; at++, b++) {
    const uint8_t *from = m->values + b * bytes;
    for (int64_t i = 0; i < bytes; i += LINE) _mm_prefetch((const char *)from + AHEAD * bytes + i, _MM_HINT_T1);
    Ints block[FOURS];
    for (int f = 0; f < FOURS; f++) {
      if (m->kind == Q8_0) {
        block[f] = load(from + f * LANES * 4);
      } else {
        const Ints both = load(from + f / 2 * LANES * 4);
        block[f] = low_halves(f % 2 ? shifted(both) : both);
      }
    }
    const Floats scale = widened(m->scales + b * LANES);
    for (int r = 0; r < count; r++) {
      const Floats found = products(m->kind, block, rows[r].fours + at * FOURS, rows[r].shifts[at]);
      sums[r] = multiply_add(found, scale * floats_of(rows[r].scales[at]), sums[r]);
    }
    if (m->kind != Q4_1) continue;
    const Floats minimum = widened(m->minima + b * LANES);
    for (int r = 0; r < count; r++) sums[r] = multiply_add(minimum, floats_of(rows[r].sums[at]), sums[r]);
  }
  for (int r = 0; r < count; r++) store(out + r * width + tile * LANES, sums[r]);
}

ALWAYS void multiply_all(Matrix m, int kind, const Row *rows, int64_t num_rows, float *out, int64_t width, int threads) {
  m.kind = kind;  // known to the compiler
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t tile = 0; tile < width / LANES; tile++) {
    int64_t t = 0;
    for (; t + AT_ONCE <= num_rows; t += AT_ONCE) multiply(&m, tile, rows + t, AT_ONCE, out + t * width, width);
    if (AT_ONCE > 4 && num_rows - t == 7) multiply(&m, tile, rows + t, 7, out + t * width, width);
    if (AT_ONCE > 4 && num_rows - t == 6) multiply(&m, tile, rows + t, 6, out + t * width, width);
    if (AT_ONCE > 4 && num_rows - t == 5) multiply(&m, tile, rows + t, 5, out + t * width, width);
    if (num_rows - t == 4) multiply(&m, tile, rows + t, 4, out + t * width, width);
    if (num_rows - t == 3) multiply(&m, tile, rows + t, 3, out + t * width, width);
    if (num_rows - t == 2) multiply(&m, tile, rows + t, 2, out + t * width, width);
    if (num_rows - t == 1) multiply(&m, tile, rows + t, 1, out + t * width, width);
  }
}

int lanes(void) { return LANES; }

int shift(void) { return SHIFT; }

// out[rows, width] = x[rows, 32 * blocks] @ matrix.T; returns whether there was memory for it.
int block_product(const float *x, int64_t num_rows, const uint8_t *values, const uint16_t *scales,
                  const uint16_t *minima, int64_t width, int64_t blocks, int kind, float *out, int threads) {
  const Matrix m = {kind, blocks, values, scales, minima};
  const int64_t words = blocks * (FOURS + 3);  // of a rounded row
  Row *rows = malloc(num_rows * sizeof(Row));
  int32_t *memory = malloc(num_rows * words * sizeof(int32_t));
  const int ready = rows != NULL && memory != NULL;
  for (int64_t t = 0; ready && t < num_rows; t++) {
    int32_t *own = memory + t * words;
    float *scales = (float *)(own + blocks * (FOURS + 1));
    rows[t] = (Row){own, own + blocks * FOURS, scales, scales + blocks};
    round_row(x + t * blocks * BLOCK, &m, rows[t]);
  }
  if (ready && kind == Q8_0) multiply_all(m, Q8_0, rows, num_rows, out, width, threads);
  if (ready && kind == Q4_0) multiply_all(m, Q4_0, rows, num_rows, out, width, threads);
  if (ready && kind == Q4_1) multiply_all(m, Q4_1, rows, num_rows, out, width, threads);
  free(memory);
  free(rows);
  return ready;
}
