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
#include <string.h>

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

// A rounded row: of each block its bytes, its scale, its sum, and what undoes a matrix's shift. Of some rows
// together each block lies beside those of the others: block b of one is at b * together.
typedef struct {
  int32_t *fours, *shifts;
  float *scales, *sums;
} Row;

ALWAYS Row row_in(int32_t *memory, int64_t row, int64_t together, int64_t blocks) {
  int32_t *shifts = memory + blocks * together * FOURS;
  float *scales = (float *)(shifts + blocks * together), *sums = scales + blocks * together;
  return (Row){memory + row * FOURS, shifts + row, scales + row, sums + row};
}

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
#define of_floats(from) _mm512_loadu_ps(from)
#define magnitudes(x) _mm512_abs_ps(x)
#define larger(a, b) _mm512_max_ps(a, b)
#define largest(x) _mm512_reduce_max_ps(x)
#define not_finite(x) _mm512_cmp_ps_mask(x, _mm512_set1_ps(FLT_MAX), _CMP_NLE_UQ)

// Rounds numbers times `inverse` to bytes, and returns their sum.
ALWAYS int round_block(const Floats *x, float inverse, int8_t *to) {
  Ints sum = _mm512_setzero_si512();
  for (int v = 0; v < BLOCK / LANES; v++) {
    const Ints whole = _mm512_cvtps_epi32(x[v] * floats_of(inverse));
    _mm_storeu_si128((__m128i *)(to + v * LANES), _mm512_cvtepi32_epi8(whole));
    sum = _mm512_add_epi32(sum, whole);
  }
  return _mm512_reduce_add_epi32(sum);
}

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
#define of_floats(from) _mm256_loadu_ps(from)
#define magnitudes(x) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define larger(a, b) _mm256_max_ps(a, b)
#define not_finite(x) _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(FLT_MAX), _CMP_NLE_UQ))

ALWAYS float largest(Floats x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Rounds numbers times `inverse` to bytes, and returns their sum.
ALWAYS int round_block(const Floats *x, float inverse, int8_t *to) {
  Ints whole[BLOCK / LANES], sum = _mm256_setzero_si256();
  for (int v = 0; v < BLOCK / LANES; v++) {
    whole[v] = _mm256_cvtps_epi32(x[v] * floats_of(inverse));
    sum = _mm256_add_epi32(sum, whole[v]);
  }
  const Ints low = _mm256_packs_epi32(whole[0], whole[1]), high = _mm256_packs_epi32(whole[2], whole[3]);
  const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((Ints *)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 14));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}

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

ALWAYS void round_row(const float *x, const Matrix *m, Row row, int64_t together) {
  const int shift = m->kind == Q8_0 ? SHIFT : m->kind == Q4_0 ? 8 : 0;
  int8_t *to = (int8_t *)row.fours;
  for (int64_t b = 0; b < m->blocks * together; b += together, x += BLOCK, to += BLOCK * together) {
    Floats own[BLOCK / LANES], sizes = floats_of(0);
    int others = 0;
    for (int v = 0; v < BLOCK / LANES; v++) {
      own[v] = of_floats(x + v * LANES);
      sizes = larger(sizes, magnitudes(own[v]));
      others |= not_finite(magnitudes(own[v]));
    }
    const float most = largest(sizes);
    const int finite = others == 0;
    // Smaller numbers count as 0. NaN and infinite ones make all that they meet NaN.
    const float inverse = finite && most > SMALLEST ? 127 / most : 0;
    int sum = 0;
    if (inverse > 0) sum = round_block(own, inverse, to);
    else memset(to, 0, BLOCK);
    row.scales[b] = finite ? most / 127 : NAN;
    row.sums[b] = row.scales[b] * (float)sum;
    row.shifts[b] = -shift * sum;
  }
}

ALWAYS void fetch_ahead(const uint8_t *block, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE) _mm_prefetch((const char *)block + AHEAD * bytes + i, _MM_HINT_T1);
}

// The products of a tile with some rows, whose number the compiler knows.
ALWAYS void multiply(const Matrix *m, int64_t tile, const Row *rows, int count, float *out, int64_t width) {
  const int64_t bytes = LANES * (m->kind == Q8_0 ? BLOCK : BLOCK / 2);
  Floats sums[AT_ONCE];
  for (int r = 0; r < count; r++) sums[r] = floats_of(0);
  for (int64_t at = 0, b = tile * m->blocks; at < m->blocks; at++, b++) {
    const uint8_t *from = m->values + b * bytes;
    fetch_ahead(from, bytes);
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

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#define GROUP 16  // rows of which the processor multiplies a block at once
#define ASK_FOR_FEATURE 0x1023
#define TILE_DATA 18
#define FOUND 0  // the tiles
#define GIVEN 1
#define WEIGHTS 2

// Whether the kernel lets this process use the processor's tiles.
static int may_use_tiles(void) {
  static int known = -1;
  if (known < 0) known = syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_DATA) == 0;
  return known;
}

static void set_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1, .bytes = {LANES * 4, BLOCK, LANES * 4}, .rows = {GROUP, GROUP, FOURS}};
  _tile_loadconfig(&tiles);
}

// The same products for `groups` times GROUP rows, with the same bits.
ALWAYS void multiply_group(const Matrix *m, int64_t tile, const Row *rows, int groups, float *out, int64_t width) {
  const int64_t bytes = LANES * (m->kind == Q8_0 ? BLOCK : BLOCK / 2);
  Ints found[GROUP], block[FOURS];
  Floats sums[2 * GROUP];
  for (int r = 0; r < groups * GROUP; r++) sums[r] = floats_of(0);
  for (int64_t at = 0, b = tile * m->blocks; at < m->blocks; at++, b++) {
    const uint8_t *from = m->values + b * bytes;
    fetch_ahead(from, bytes);
    for (int f = 0; m->kind != Q8_0 && f < FOURS; f++) {
      const Ints both = load(from + f / 2 * LANES * 4);
      block[f] = low_halves(f % 2 ? shifted(both) : both);
    }
    _tile_loadd(WEIGHTS, m->kind == Q8_0 ? from : (const uint8_t *)block, LANES * 4);
    const Floats scale = widened(m->scales + b * LANES);
    const Floats minimum = m->kind == Q4_1 ? widened(m->minima + b * LANES) : floats_of(0);
    for (int g = 0; g < groups; g++) {
      const Row *own = rows + g * GROUP;
      const int64_t first = at * GROUP;
      _tile_loadd(GIVEN, own->fours + first * FOURS, BLOCK);
      _tile_zero(FOUND);
      _tile_dpbsud(FOUND, GIVEN, WEIGHTS);
      _tile_stored(FOUND, found, LANES * 4);
      for (int r = 0; r < GROUP; r++) {
        Floats *sum = sums + g * GROUP + r;
        const Ints whole = _mm512_add_epi32(found[r], _mm512_set1_epi32(own->shifts[first + r]));
        *sum = multiply_add(_mm512_cvtepi32_ps(whole), scale * floats_of(own->scales[first + r]), *sum);
        if (m->kind == Q4_1) *sum = multiply_add(minimum, floats_of(own->sums[first + r]), *sum);
      }
    }
  }
  for (int r = 0; r < groups * GROUP; r++) store(out + r * width + tile * LANES, sums[r]);
}

// Multiplies rows that lie in whole groups.
ALWAYS void multiply_groups(Matrix m, int kind, const Row *rows, int64_t num_rows, float *out, int64_t width, int threads) {
  m.kind = kind;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    set_tiles();
#pragma omp for
    for (int64_t tile = 0; tile < width / LANES; tile++) {
      int64_t t = 0;
      for (; t + 2 * GROUP <= num_rows; t += 2 * GROUP) multiply_group(&m, tile, rows + t, 2, out + t * width, width);
      if (t < num_rows) multiply_group(&m, tile, rows + t, 1, out + t * width, width);
    }
    _tile_release();
  }
}
#else
#define GROUP 1
#define may_use_tiles() 0
#define multiply_groups(m, kind, rows, num_rows, out, width, threads) (void)m
#endif

ALWAYS void multiply_all(Matrix m, int kind, const Row *rows, int64_t num_rows, int64_t grouped, float *out, int64_t width, int threads) {
  m.kind = kind;  // known to the compiler
  if (grouped > 0) multiply_groups(m, kind, rows, grouped, out, width, threads);
  if (grouped == num_rows) return;
  rows += grouped, out += grouped * width, num_rows -= grouped;
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
  const int64_t grouped = may_use_tiles() ? num_rows / GROUP * GROUP : 0;
  for (int64_t t = 0; ready && t < num_rows; t++) {
    const int64_t together = t < grouped ? GROUP : 1, first = t / together * together;
    rows[t] = row_in(memory + first * words, t - first, together, blocks);
    round_row(x + t * blocks * BLOCK, &m, rows[t], together);
  }
  if (ready && kind == Q8_0) multiply_all(m, Q8_0, rows, num_rows, grouped, out, width, threads);
  if (ready && kind == Q4_0) multiply_all(m, Q4_0, rows, num_rows, grouped, out, width, threads);
  if (ready && kind == Q4_1) multiply_all(m, Q4_1, rows, num_rows, grouped, out, width, threads);
  free(memory);
  free(rows);
  return ready;
}
