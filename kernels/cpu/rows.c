// What a forward of few rows does besides products of integers, in float32: norms, rotary positions,
// attention of a window with few queries, low-rank products, the best logits. A call of torch takes longer
// than most of these take. What a row gives does not depend on the other rows, nor on the number of threads.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define MOST_VECTORS 16  // of a head
#define ALWAYS static inline __attribute__((always_inline))
#define EACH_TASK _Pragma("omp parallel for num_threads(threads) if (threads > 1)")

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

ALWAYS Floats load(const float *from) { return *(const Floats *)from; }

ALWAYS void store(float *to, Floats found) { *(Floats *)to = found; }

ALWAYS Floats load_weights(const void *from, int64_t at, int halves) {
  if (!halves) return load((const float *)from + at);
  return (Floats)(__builtin_convertvector(*(const Halves *)((const uint16_t *)from + at), Ints) << 16);
}

ALWAYS float sum(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#endif
}

ALWAYS float dot(const float *a, const float *b, int64_t size) {
  Floats sums = {0};
  for (int64_t i = 0; i < size; i += LANES) sums += load(a + i) * load(b + i);
  return sum(sums);
}

// e to the power of numbers that are not above 0.
ALWAYS Floats exponential(Floats x) {
  const Floats least = (Floats){0} - 87.0f, magic = (Floats){0} + 12582912.0f;  // rounds to integers
  const Ints low = x < least;
  x = (Floats)((low & (Ints)least) | (~low & (Ints)x));
  const Floats n = (x * 1.44269504f + magic) - magic;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return y * (Floats)power;
}

ALWAYS void norm_row(const float *x, const float *weight, float eps, float *out, int64_t size) {
  const float scale = 1 / sqrtf(dot(x, x, size) / (float)size + eps);
  for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

int lanes_of_floats(void) { return LANES; }

// out = RMSNorm of x, or of total = x + residual if there is one.
void rms_norm(const float *x, const float *residual, const float *weight, float eps, float *total, float *out,
          int64_t rows, int64_t size, int threads) {
  EACH_TASK
  for (int64_t t = 0; t < rows; t++) {
    const float *from = x + t * size;
    if (residual != NULL) {
      for (int64_t i = 0; i < size; i += LANES) store(total + t * size + i, load(from + i) + load(residual + t * size + i));
      from = total + t * size;
    }
    norm_row(from, weight, eps, out + t * size, size);
  }
}

// Norms and rotates query and key heads in place, and stores keys and values in their slots. A token
// has `queries` heads, then `keys` heads of each. `norms` has a row for each head, or is NULL.
void rotate_and_store(float *heads, const float *norms, float eps, const float *cosines, const float *sines,
                      const int64_t *slots, float *key_pool, float *value_pool, int64_t tokens, int64_t queries,
                      int64_t keys, int64_t size, int64_t rotated, int threads) {
  const int64_t width = keys * size, half = rotated / 2;
  EACH_TASK
  for (int64_t t = 0; t < tokens; t++) {
    float *own = heads + t * (queries + 2 * keys) * size, before[rotated];
    const float *cosine = cosines + t * rotated, *sine = sines + t * rotated;
    for (int64_t n = 0; n < queries + keys; n++) {
      float *head = own + n * size;
      if (norms != NULL) norm_row(head, norms + n * size, eps, head, size);
      memcpy(before, head, rotated * sizeof(float));
      for (int64_t i = 0; i < half; i++) {
        head[i] = before[i] * cosine[i] + before[i + half] * sine[i];
        head[i + half] = before[i + half] * cosine[i + half] + before[i] * sine[i + half];
      }
    }
    memcpy(key_pool + slots[t] * width, own + queries * size, width * sizeof(float));
    memcpy(value_pool + slots[t] * width, own + (queries + keys) * size, width * sizeof(float));
  }
}

// A head's keys and values in pools whose slots have `width` numbers, `page_size` slots a page.
typedef struct {
  const float *keys, *values;
  const int32_t *pages;
  int64_t page_size, width;
} Head;

#define EACH_KEY(pool) \
  for (int64_t p = 0, k = 0; k < stop; p++) \
    for (const float *from = (pool) + head.pages[p] * head.page_size * head.width, \
                     *last = from + (stop - k < head.page_size ? stop - k : head.page_size) * head.width; \
         from < last; from += head.width, k++)

ALWAYS void attend_head(const float *query, Head head, int64_t stop, int64_t size, float scale, float *scores, float *out) {
  float most = -INFINITY, total = 0;
  EACH_KEY(head.keys) {
    scores[k] = dot(query, from, size) * scale;
    most = scores[k] > most ? scores[k] : most;
  }
  for (int64_t k = 0; k < stop; k += LANES) store(scores + k, exponential(load(scores + k) - most));
  Floats sums[MOST_VECTORS];
  for (int64_t i = 0; i < size / LANES; i++) sums[i] = (Floats){0};
  EACH_KEY(head.values) {
    total += scores[k];
    for (int64_t i = 0; i < size / LANES; i++) sums[i] += scores[k] * load(from + i * LANES);
  }
  for (int64_t i = 0; i < size / LANES; i++) store(out + i * LANES, sums[i] / total);
}

// Attention of the windows that run `here`; returns whether there was memory for it. A query's row in
// `heads` has `stride` numbers and starts with its heads. For `first` to `block` see PagedWindows.
int attend_windows(const float *heads, int64_t stride, const float *key_pool, const float *value_pool,
                   const int32_t *first, const int32_t *start, const int32_t *kv_stop, const int32_t *block,
                   const int32_t *pages, int64_t pages_each, int64_t page_size, const uint8_t *here,
                   int64_t windows, int64_t num_heads, int64_t key_heads, int64_t size, float scale, float *out, int threads) {
  int64_t room = 0;
  for (int64_t w = 0; w < windows; w++) room = here[w] && kv_stop[w] > room ? kv_stop[w] : room;
  room += LANES;
  float *scores = calloc(windows * num_heads * room, sizeof(float));
  if (scores == NULL) return 0;
  EACH_TASK
  for (int64_t task = 0; task < windows * num_heads; task++) {
    const int64_t w = task / num_heads, n = task % num_heads, offset = n / (num_heads / key_heads) * size;
    const Head head = {key_pool + offset, value_pool + offset, pages + w * pages_each, page_size, key_heads * size};
    if (!here[w]) continue;
    for (int64_t q = first[w]; q < first[w + 1]; q++) {
      const int64_t place = start[w] + q - first[w], end = block[w] > 0 ? (place / block[w] + 1) * block[w] : kv_stop[w];
      const int64_t stop = end < kv_stop[w] ? end : kv_stop[w];
      const float *query = heads + q * stride + n * size;
      float *own = scores + task * room, *to = out + (q * num_heads + n) * size;
      if (size == 64) attend_head(query, head, stop, 64, scale, own, to);
      else if (size == 128) attend_head(query, head, stop, 128, scale, own, to);
      else attend_head(query, head, stop, size, scale, own, to);
    }
  }
  free(scores);
  return 1;
}

ALWAYS void row_extremes(const float *x, int64_t size, int64_t forbidden, float *lse, float *best, int64_t *index) {
  const int64_t whole = size - size % LANES;
  Floats most = (Floats){0} - INFINITY;
  Ints at = {0};  // the vector of each lane's largest
  for (int64_t i = 0; i < whole; i += LANES) {
    Floats own = load(x + i);
    if (forbidden >= i && forbidden < i + LANES) own[forbidden - i] = -INFINITY;
    const Ints more = own > most;
    most = (Floats)((more & (Ints)own) | (~more & (Ints)most));
    at = (more & (int32_t)i) | (~more & at);
  }
  *best = -INFINITY, *index = 0;
  for (int64_t lane = 0; lane < LANES; lane++) {
    const int64_t own = at[lane] + lane;
    if (most[lane] > *best || (most[lane] == *best && own < *index)) *best = most[lane], *index = own;
  }
  for (int64_t i = whole; i < size; i++)
    if (i != forbidden && x[i] > *best) *best = x[i], *index = i;
  const float highest = forbidden >= 0 && x[forbidden] > *best ? x[forbidden] : *best;
  Floats sums[4] = {{0}, {0}, {0}, {0}};
  for (int64_t i = 0; i < whole; i += LANES) sums[i / LANES % 4] += exponential(load(x + i) - highest);
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int64_t i = whole; i < size; i++) total += expf(x[i] - highest);
  *lse = highest == -INFINITY ? highest : highest + logf(total);
}

// Of each row the logarithm of the sum of its exponentials, then the largest number but for the
// column `forbidden`, if that is not negative, and its lowest column.
void extremes(const float *x, int64_t rows, int64_t size, int64_t forbidden, float *found, int64_t *index, int threads) {
  EACH_TASK
  for (int64_t r = 0; r < rows; r++) row_extremes(x + r * size, size, forbidden, found + r, found + rows + r, index + r);
}

// Both matrices of a low-rank product, in bfloat16 if `halves`, else in float32: the rows of `down`, then
// `up` as [outputs / LANES, rank, LANES]. `start` is the column of y that the first output is added to.
typedef struct {
  const void *weights;
  int64_t halves, rank, outputs, start;
} LowRank;

#define AHEAD 2048  // bytes, so that the processor does not wait for memory
#define TOGETHER 4  // rows that read the weights together

ALWAYS void add_part(const float *const *x, float *const *y, int rows, LowRank part, int halves, int64_t inputs) {
  float middle[part.rank][TOGETHER];
  int64_t at = 0;
  for (int64_t r = 0; r < part.rank; r++) {
    Floats sums[TOGETHER] = {0}, others[TOGETHER] = {0};
    int64_t i = 0;
    for (; i + LANES < inputs; i += 2 * LANES) {
      _mm_prefetch((const char *)part.weights + (at + i) * (halves ? 2 : 4) + AHEAD, _MM_HINT_T1);
      const Floats weights = load_weights(part.weights, at + i, halves), next = load_weights(part.weights, at + i + LANES, halves);
      for (int t = 0; t < rows; t++) sums[t] += weights * load(x[t] + i), others[t] += next * load(x[t] + i + LANES);
    }
    if (i < inputs)
      for (int t = 0; t < rows; t++) sums[t] += load_weights(part.weights, at + i, halves) * load(x[t] + i);
    for (int t = 0; t < rows; t++) middle[r][t] = sum(sums[t] + others[t]);
    at += inputs;
  }
  for (int64_t i = part.start; i < part.start + part.outputs; i += LANES) {
    Floats sums[TOGETHER] = {0};
    for (int64_t r = 0; r < part.rank; r++, at += LANES) {
      _mm_prefetch((const char *)part.weights + at * (halves ? 2 : 4) + AHEAD, _MM_HINT_T1);
      const Floats weights = load_weights(part.weights, at, halves);
      for (int t = 0; t < rows; t++) sums[t] += weights * middle[r][t];
    }
    for (int t = 0; t < rows; t++) store(y[t] + i, load(y[t] + i) + sums[t]);
  }
}

// Adds up @ (down @ x) of all parts to some rows of y.
void add_low_rank(const float *x, const int64_t *tokens, int64_t rows, int64_t inputs, const LowRank *parts,
                  int64_t num_parts, float *y, int64_t outputs) {
  for (int64_t p = 0; p < num_parts; p++)
    for (int64_t t = 0; t < rows; t += TOGETHER) {
      const float *from[TOGETHER];
      float *to[TOGETHER];
      const int64_t few = rows - t < TOGETHER ? rows - t : TOGETHER;
      for (int64_t n = 0; n < few; n++) from[n] = x + tokens[t + n] * inputs, to[n] = y + tokens[t + n] * outputs;
#define OF_ROWS(n) if (few == n) { if (parts[p].halves) add_part(from, to, n, parts[p], 1, inputs); else add_part(from, to, n, parts[p], 0, inputs); }
      OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4)
    }
}
